"""What the restart tests run on every rank: training that saves at every step, resumes from the newest checkpoint, and dies.

    restart.py STEPS DEATHS     # DEATHS: RANK@STEP@PLACE,..., one for each start of the script but the last

PLACE is `begin` (of the step), a place in `save` (`files`: the weights are written; `manifest`: all is written, but not renamed;
`rename`: it is, but old versions are not deleted yet), or a number of milliseconds after the begin of the save. Rank 0 prints a
JSON object a step. In the last start the same training follows once more, from the beginning and without a checkpoint.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle_core.checkpoint import folder
from twinkle_core.model import layout

RANK, START = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(owner: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        die()

    setattr(owner, name, replacement)


def prepare_death(place: str) -> None:
    places = {"files": (layout, "write_model"), "manifest": (folder, "_sync_tree"), "rename": (folder.CheckpointWriter, "_claim")}
    if place in places:
        die_after(*places[place])
    else:
        timer = threading.Timer(int(place) / 1000, die)
        timer.daemon = True
        timer.start()


def train(steps: int, death: str | None) -> list[dict[str, Any]]:
    """Train; `death=None` without checkpoints."""
    data = Dataset(DatasetMeta("tiny://self-cognition", data_slice=range(4 * steps)))
    data.set_template("Qwen3Template", model_id="tiny://qwen3")
    data.encode()
    model = TransformersModel("tiny://qwen3", device="cpu")
    model.set_optimizer("AdamW", lr=1e-3)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=steps, num_warmup_steps=2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    if death is not None and (found := model.resume_from_checkpoint("checkpoints")):
        loader.resume_from_checkpoint(found)
    rank, at, place = death.split("@") if death else ("-1", "-1", "")
    seen = []
    for batch in loader:
        step = int(model.state().step) + 1
        is_last = (int(rank), int(at)) == (RANK, step)
        if is_last and place == "begin":
            die()
        loss = model.forward_backward(inputs=batch)["loss"]
        model.clip_grad_and_step()
        metrics = model.calculate_metric(is_training=True)
        seen.append({"start": START, "step": metrics["step"], "loss": loss, "norm": metrics["grad_norm"]})
        if RANK == 0:
            print(json.dumps(seen[-1]), flush=True)
        if death is not None:
            if is_last:
                prepare_death(place)
            model.save("run", "checkpoints", with_optimizer=True, keep_last=2)
    return seen


def main() -> None:
    steps, deaths = int(sys.argv[1]), [*sys.argv[2].split(","), ""]
    twinkle.initialize(mode="local")
    train(steps, deaths[START])
    if len(deaths) - 1 == START:
        train(steps, None)


if __name__ == "__main__":
    main()
