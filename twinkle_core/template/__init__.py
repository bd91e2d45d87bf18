"""Templates turn conversations into tokens and labels, and tokens into messages."""
