"""The real SmolLM2 learns from real chats by LoRA, and what it learned is sampled from."""

import pytest

from twinkle_core.dataloader.loader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.model.transformers_model import TransformersModel
from twinkle_core.sampler.torch_sampler import TorchSampler

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY = {"max_tokens": 16, "temperature": 0}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_lora_lowers_the_loss_of_chats_it_has_not_seen_and_is_sampled_from(assets, tmp_path):
    """One epoch of 112 of the chats took the loss of the others from 1.07 to 0.79."""
    base = str(assets / "SmolLM2-135M-Instruct")
    data = Dataset(DatasetMeta(str(assets / "data" / "conversations.jsonl")))
    data.set_template("Template", model_id=base, max_length=512, truncation_strategy="right")
    data.encode()
    train, held_out = data.split(test_size=16, seed=1)
    model = TransformersModel(base, device="cpu", dtype="float32")
    model.add_adapter_to_model("chat", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})
    model.set_optimizer("AdamW", lr=5e-4)

    def held_out_loss():
        for batch in DataLoader(held_out, batch_size=8):
            model.forward_only(inputs=batch)
        return model.calculate_metric(is_training=False)["loss"]

    before = held_out_loss()
    steps = 0
    while steps < 28:  # two epochs
        for batch in DataLoader(train, batch_size=8):
            model.forward_backward(inputs=batch)
            steps += model.clip_grad_and_step()
    after = held_out_loss()
    assert after < 0.9 * before

    sampler = TorchSampler(base, device="cpu", dtype="float32")
    sampler.set_template("Template")
    uri = model.save("chat", str(tmp_path))
    tuned = sampler.sample([CHAT], GREEDY, adapter_uri=uri)[0].sequences[0]
    plain = sampler.sample([CHAT], GREEDY)[0].sequences[0]
    assert tuned.decoded
    assert tuned.logprobs != plain.logprobs
    scored = model.forward_only(inputs=[tuned.new_input_feature])["logprobs"][0]
    assert scored[-len(tuned.tokens):] == pytest.approx(tuned.logprobs, abs=1e-3)
