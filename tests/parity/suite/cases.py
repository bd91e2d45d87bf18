"""What a run of the suite is made of, and the lists of runs."""

from dataclasses import dataclass, replace

from twinkle_core.mesh import DeviceMesh

LONG, SHORT, BRIEF = 20, 5, 2  # steps
CONTRACT = ("fsdp=4,dp=2", "tp=2,pp=4", "tp=2,pp=2,dp=2")
PAIRS = ("dp=2", "fsdp=2", "tp=2", "pp=2")
FURTHER = ("dp=4", "fsdp=4", "fsdp=2,dp=2", "tp=4", "pp=4", "tp=2,dp=2", "tp=2,fsdp=2", "pp=2,dp=2", "pp=2,fsdp=2", "tp=2,pp=2",
           "tp=2,pp=2,fsdp=2", "tp=2,fsdp=2,dp=2", "pp=2,fsdp=2,dp=2")
INTERLEAVED = "pp=2,vpp=2"
OF_FAMILIES = ("fsdp=2", "tp=2", "pp=2", "fsdp=4,dp=2", "tp=2,pp=2,dp=2")
FAMILIES = ("llama", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    Attributes:
        mesh: as `DeviceMesh.parse` reads it; "" is one device.
        family: of the model (`families`).
        layers: of the model.
        steps: of the optimizer.
        lora: train adapters instead of all weights.
        dropout: of the adapters; other ranks draw other numbers.
        said: say an accumulation of 2, instead of calling `forward_backward` twice before a step.
        peek: ask for the norm between the two, which reduces gradients too early.
        checkpointing: compute activations again in the backward pass.
        shuffle: visit the rows in another order.
        save_after: step after which a checkpoint is saved in `folder`; 0: never.
        folder: of checkpoints.
        resume: go on from the newest checkpoint in `folder`.
        fault: the mistake that is put in by hand (`faults`).
    """

    mesh: str = ""
    family: str = "qwen3_5"
    layers: int = 4
    steps: int = SHORT
    lora: bool = False
    dropout: float = 0.0
    said: bool = True
    peek: bool = False
    checkpointing: bool = False
    shuffle: bool = False
    save_after: int = 0
    folder: str = ""
    resume: bool = False
    fault: str = ""

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return DeviceMesh.parse(self.mesh).world_size if self.mesh else 1

    @property
    def alone(self) -> "Case":
        """The same run on one device, as it should be."""
        return replace(self, mesh="", said=True, peek=False, checkpointing=False, fault="", save_after=0, folder="", resume=False)

    def __str__(self) -> str:
        mesh = self.mesh.replace("=", "").replace(",", "x")
        words = [self.family, mesh, "lora" if self.lora else "", "" if self.said else "done",
                 "peek" if self.peek else "", "checkpointing" if self.checkpointing else "", self.fault]
        return "-".join(word for word in words if word)


def brief_cases() -> list[Case]:
    """2 steps on two ranks: what can be run all the time."""
    return [Case(mesh=mesh, steps=BRIEF, lora=lora) for mesh, lora in zip(PAIRS, (False, True, False, True), strict=True)]


def long_cases() -> list[Case]:
    """20 steps of Qwen3.5."""
    return [Case(mesh=mesh, steps=LONG, lora=lora) for mesh in (*PAIRS, *CONTRACT) for lora in (False, True)]


def short_cases() -> list[Case]:
    """5 steps: the other meshes, accumulation that is done instead of said, and the other families."""
    return [
        *(Case(mesh=mesh, lora=lora) for mesh in FURTHER for lora in (False, True)),
        *(Case(mesh=INTERLEAVED, layers=8, lora=lora) for lora in (False, True)),
        *(Case(mesh=mesh, said=False) for mesh in PAIRS),
        *(Case(mesh=mesh, said=False, peek=True, family="qwen3") for mesh in (*PAIRS, "tp=2,pp=2")),
        *(Case(mesh=mesh, checkpointing=True, family="qwen3") for mesh in ("tp=2,fsdp=2", "pp=2")),
        *(Case(mesh=mesh, family=family) for family in FAMILIES for mesh in OF_FAMILIES),
    ]
