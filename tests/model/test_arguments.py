"""Arguments of the wrong type are errors that say what is allowed."""

import pytest

from twinkle_core.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"gradient_checkpointing": "yes"}, ArgumentTypeError, r"`gradient_checkpointing='yes'` is of type str. Use True or False"),
    ({"trust_remote_code": 1}, ArgumentTypeError, r"`trust_remote_code=1` is of type int.*, or None: as `TWINKLE_"),
    ({"mixed_precision": ["bf16"]}, ArgumentError, r"`mixed_precision=\['bf16'\]` is not allowed. Use one of: `bf16`, `fp16`"),
    ({"mixed_precision": "bf32"}, ArgumentError, r"`mixed_precision='bf32'` is not allowed. Use one of"),
    ({"dtype": ["bfloat16"]}, ArgumentTypeError, r"`dtype=\['bfloat16'\]` is of type list. Use a floating `torch.dtype`"),
    ({"device": 0}, ArgumentTypeError, r"`device=0` is of type int. Use a string"),
])
def test_a_wrong_option_of_the_model_is_an_error_with_advice(options, error, text, build):
    with pytest.raises(error, match=text):
        build(**options)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda m: m.set_processor(packing="yes"), ArgumentTypeError, r"`packing='yes'` is of type str. Use True or False"),
    (lambda m: m.set_processor(pad_token_id="x"), ArgumentError, r"`pad_token_id='x'`: use an integer >= 0"),
    (lambda m: m.set_processor(pad_token_id=101), ArgumentError, r"`pad_token_id=101`: .* 0 to 100"),
    (lambda m: m.save("x", with_optimizer="yes"), ArgumentTypeError, r"`with_optimizer='yes'`.*True or False"),
    (lambda m: m.save("x", merge=1), ArgumentTypeError, r"`merge=1`.*True or False"),
    (lambda m: m.get_state_dict(merge="no"), ArgumentTypeError, r"`merge='no'`.*True or False"),
    (lambda m: m.upload_to_hub("x", "ms://a/b", private="no"), ArgumentTypeError, r"`private='no'`.*True or False"),
    (lambda m: m.calculate_metric(is_training="yes"), ArgumentTypeError, r"`is_training='yes'`.*True or False"),
    (lambda m: m.forward_only([], disable_lora="yes"), ArgumentTypeError, r"`disable_lora='yes'`.*True or False"),
    (lambda m: m.step(adapter_name=3), ArgumentTypeError, r"`adapter_name=3` is of type int. Pass a string"),
])
def test_a_wrong_argument_of_a_method_is_an_error_with_advice(call, error, text, build):
    with pytest.raises(error, match=text):
        call(build())
