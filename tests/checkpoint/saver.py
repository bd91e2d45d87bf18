"""A process that saves the checkpoint `last` again and again until it is killed: `python saver.py FOLDER`.

Prints one line when it is ready and the step of each save that has returned.
"""

import sys
from pathlib import Path

from twinkle_core.checkpoint.folder import CheckpointWriter
from twinkle_core.checkpoint.manifest import Manifest


def main(folder: str) -> None:
    content = bytes(range(256)) * 2000
    step = max((int(path.name.removeprefix("step-")) for path in Path(folder).glob("*/step-*")), default=0)
    print("ready", flush=True)
    while True:
        step += 1
        with CheckpointWriter(folder, "last") as writer:
            for part in range(3):
                (writer.folder / f"part-{part}.safetensors").write_bytes(content)
            (writer.folder / f"step-{step}").write_text("")
            writer.commit(Manifest(kind="full", step=step), keep_last=3)
        print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
