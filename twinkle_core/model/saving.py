"""`save`, `load` and `resume_from_checkpoint` of a model: what goes into a checkpoint, and what is checked before it comes back.

A checkpoint of a model is a folder that transformers loads; of an adapter, one that peft loads. Whatever does not fit is an error
before anything in memory has changed. How folders are written is left to `twinkle_core.checkpoint`, what the files look like to
`layout`.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from twinkle_core import registry, session
from twinkle_core.checkpoint.folder import CheckpointWriter, check_keep_last, complete_checkpoints, is_checkpoint, survey
from twinkle_core.checkpoint.manifest import FILE_NAME, Manifest, verify
from twinkle_core.checkpoint.naming import check_name, local_path
from twinkle_core.dataloader.positions import STATE_FILE, collect_states
from twinkle_core.errors import ArgumentError, CheckpointError, did_you_mean, listing
from twinkle_core.hub import parse_uri
from twinkle_core.model import identity, layout, training_state
from twinkle_core.model.merging import plain_weights
from twinkle_core.model.whole import WholeModel
from twinkle_core.warning import warn

if TYPE_CHECKING:
    from twinkle_core.model.adapter import AdapterState
    from twinkle_core.model.streaming import WholeStream
    from twinkle_core.model.transformers_model import TransformersModel

Take = Callable[[Path], None]
"""Copies the weights in a folder to where they belong."""


def save(
    model: "TransformersModel | WholeModel", name: str, output_dir: str, *, adapter_name: str, with_optimizer: bool, merge: bool,
    keep_last: int | None, stream: "WholeStream | None" = None,
) -> str:
    """Write a checkpoint and return its folder. `TrainableModel.save` documents the arguments.

    `stream` gives the tensors where `model` is an outline.
    """
    check_name(name)
    check_keep_last(keep_last)
    state = model.ready(adapter_name)
    if merge and not state.is_lora:
        raise ArgumentError("`save(merge=True)`: this model has no adapter to merge. Leave `merge` out.")
    if merge and with_optimizer:
        raise ArgumentError("`save(merge=True, with_optimizer=True)`: a merged model cannot be resumed, because the adapter is "
                            "gone. Save twice: once merged, once with the optimizer.")
    is_adapter = state.is_lora and not merge
    weights = layout.adapter_weights(model.module, state.name) if is_adapter else plain_weights(
        model.module, merge=state.name if merge else None)
    needed = layout.size_bytes(weights) + (training_state.size_bytes(state) if with_optimizer else 0)
    manifest = Manifest(kind="merged" if merge else "adapter" if is_adapter else "full", step=state.step,
                        adapter_name=state.name, has_training_state=with_optimizer, identity=_identity(model, state),
                        template=_template(state))
    with CheckpointWriter(output_dir, name, needed_bytes=needed) as writer:
        if is_adapter:
            layout.write_adapter(writer.folder, model.module, state.name, model.lora.configs[state.name], base=_base_name(model),
                                 source=_source(model), stream=None if stream is None else stream.weights)
        else:
            layout.write_model(writer.folder, model.module, weights, source=_source(model),
                               stream=None if stream is None else stream.weights)
        if with_optimizer:
            training_state.write(writer.folder, state, stream=None if stream is None else stream.moments)
            (writer.folder / STATE_FILE).write_text(json.dumps(collect_states()), "utf-8")
        saved = str(writer.commit(manifest, keep_last=keep_last))
    state.saved_step = state.step
    return saved


def load(model: "TransformersModel | WholeModel", path: str, *, adapter_name: str, take: Take | None = None) -> None:
    """Load weights only: of a Twinkle checkpoint, or of a folder that transformers or peft wrote.

    `take` copies the weights out of a folder where `model` is an outline.
    """
    state = model.ready(adapter_name)
    folder = local_path(path)
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` is not a folder.{_near(folder)} Pass what `save` returned.")
    if not is_checkpoint(folder) and (inside := complete_checkpoints(folder)):
        raise CheckpointError(f"`{folder}` holds {len(inside)} checkpoints. Pass one of them, e.g. `{inside[-1][0]}`.")
    manifest = verify(folder) if is_checkpoint(folder) else None
    if manifest is None and not any((folder / name).is_file() for name in (layout.ADAPTER_CONFIG, "config.json")):
        raise CheckpointError(f"`{folder}` holds no checkpoint: neither a model (`config.json`) nor an adapter "
                              f"(`{layout.ADAPTER_CONFIG}`).{_near(folder)} Pass what `save` returned.")
    _check_fits(model, state, folder, manifest)
    if manifest is not None and (text := _other_base(model, state, folder, manifest)):
        warn(f"{text} It is loaded all the same, and may not work as well.")
    _apply_weights(model, state, folder, take)


def resume(
    model: "TransformersModel | WholeModel", path: str, *, adapter_name: str, take: Take | None = None,
    load: training_state.Load = training_state.load_file,
) -> str | Literal[False]:
    """Load everything that training needs to go on, and return the checkpoint; False if `path` has none yet.

    Where `model` is an outline, `take` copies the weights out of a folder, and `load` reads tensors without memory.
    """
    state = model.ready(adapter_name)
    folder = _resumable(local_path(path), state)
    if folder is None:
        if session.current().launcher.topology().rank == 0:
            print(f"twinkle: nothing to resume was found in `{local_path(path)}`; the model stays as it is.", file=sys.stderr)
        return False
    manifest = verify(folder)
    if not manifest.has_training_state:
        raise CheckpointError(f"`{folder}` was saved without optimizer state, so training cannot go on from it exactly. Save with "
                              "`save(..., with_optimizer=True)`, or take its weights only: `load`.")
    if manifest.adapter_name != state.name:
        raise CheckpointError(f"`{folder}` is of the adapter `{manifest.adapter_name}`, not of `{state.name}`. Resume with "
                              f"`adapter_name={manifest.adapter_name!r}`, or take its weights only: `load`.")
    _check_fits(model, state, folder, manifest)
    if text := _other_base(model, state, folder, manifest):
        raise CheckpointError(f"{text} Build the model that it was trained with, or take its weights only: `load`. Nothing was "
                              "changed.")
    saved = training_state.read(folder, state, load=load)
    _apply_weights(model, state, folder, take)
    training_state.apply(saved, state)
    state.saved_step = state.step
    return str(folder)


def state_dict(model: "TransformersModel | WholeModel", *, adapter_name: str, merge: bool) -> dict[str, torch.Tensor]:
    """Return name -> a copy on the CPU: the adapter's weights under peft's names, or the model's, merged if asked."""
    state = model.ready(adapter_name)
    if state.is_lora and not merge:
        weights = layout.adapter_weights(model.module, state.name)
    else:
        weights = plain_weights(model.module, merge=state.name if state.is_lora else None)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}


def upload(path: str, repo_id: str, *, private: bool) -> str:
    """Upload a checkpoint without its training state and return its URI."""
    folder = local_path(path)
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` is not a folder.{_near(folder)} Pass what `save` returned.")
    if is_checkpoint(folder):
        verify(folder)
    location = parse_uri(repo_id)
    hub = registry.resolve("hubs", location.scheme)()
    with tempfile.TemporaryDirectory() as staged:
        for source in folder.iterdir():
            if source.is_file() and source.name not in (STATE_FILE, FILE_NAME):
                _link_or_copy(source, Path(staged) / source.name)
        return str(hub.upload(Path(staged), location.repo_id, kind="model", private=private))


def _resumable(path: Path, state: "AdapterState") -> Path | None:
    """Return the checkpoint that `path` means: itself, or the newest complete one in it that fits `state`."""
    if not path.is_dir():
        if path.exists():
            raise CheckpointError(f"`{path}` is a file, not a folder of checkpoints. Pass the folder that `save` wrote to.")
        if near := _near(path):
            raise CheckpointError(f"There is no checkpoint `{path}`.{near}")
        return None
    if is_checkpoint(path):
        return path
    if any(path.glob("*.safetensors")):
        raise CheckpointError(f"`{path}` holds weights but no `{FILE_NAME}`: it was not saved by Twinkle, or is not complete. "
                              "Take the weights only: `load`.")
    found, damaged = survey(path)
    kind = "adapter" if state.is_lora else "full"
    fitting = [item for item in found if item[1].kind == kind and item[1].adapter_name == state.name]
    resumable = [item for item in fitting if item[1].has_training_state]
    if resumable:
        for error in damaged.values():
            warn(f"Passed over a damaged checkpoint. {error}")
        return resumable[-1][0]
    if not found:
        damaged |= {inside: CheckpointError(f"`{inside}` has no `{FILE_NAME}`, so it is not complete.")
                    for inside in sorted(path.iterdir()) if (inside / training_state.FOLDER).is_dir() and inside not in damaged}
    if damaged:
        raise CheckpointError(f"`{path}` holds {len(damaged)} checkpoint(s) that cannot be used, and none that can: "
                              f"{next(reversed(damaged.values()))} To begin anew, save to another folder.")
    if not found:
        return None
    if fitting:
        raise CheckpointError(f"`{path}` holds {listing(p.name for p, _ in fitting)}, saved without optimizer state, so "
                              "training cannot go on from there exactly. Save with `save(..., with_optimizer=True)`, or take the "
                              "weights of one: `load`.")
    wanted = f"of the adapter `{state.name}`" if state.is_lora else "of the full model"
    raise CheckpointError(f"`{path}` holds checkpoints, but none {wanted}: {listing(p.name for p, _ in found)}. Use another "
                          "folder, or train what was saved there.")


def _check_fits(model: "TransformersModel | WholeModel", state: "AdapterState", folder: Path, manifest: Manifest | None) -> None:
    """Raise `CheckpointError` unless the weights in `folder` are those of `state`. Reads heads of files only."""
    holds_adapter = (folder / layout.ADAPTER_CONFIG).is_file()
    if holds_adapter and not state.is_lora:
        raise CheckpointError(f"`{folder}` holds an adapter, but this model has none. Call `add_adapter_to_model` first.")
    if state.is_lora and not holds_adapter:
        raise CheckpointError(f"`{folder}` holds a whole model, not the adapter `{state.name}`. Start from it with "
                              f"`TransformersModel(model_id={str(folder)!r})`, or use a checkpoint of the adapter.")
    present = _identity(model, state)
    if holds_adapter:
        if manifest is not None:
            identity.check_model(folder, manifest.identity.get("model", {}), present["model"])
        identity.check_adapter(folder, identity.read_adapter(folder), present["adapter"])
        weights = layout.adapter_weights(model.module, state.name)
        expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    else:
        identity.check_model(folder, identity.read_model(folder), present["model"])
        expected = layout.file_shapes(model.module, plain_weights(model.module))
    identity.check_shapes(folder, layout.read_shapes(folder), expected, is_exact=holds_adapter)


def _apply_weights(
    model: "TransformersModel | WholeModel", state: "AdapterState", folder: Path, take: Take | None,
) -> None:
    """Copy the weights of a checkpoint that fits into the live module. Gradients of the old weights are discarded."""
    if take is not None:
        take(folder)
    elif state.is_lora:
        layout.copy_weights(folder, layout.adapter_weights(model.module, state.name))
    else:
        layout.load_model(folder, model.module, plain_weights(model.module))
    if not state.is_lora:
        model.precision.keep_widened()  # a LoRA added later must not round what was loaded
    state.discard_gradients()


def _identity(model: "TransformersModel | WholeModel", state: "AdapterState") -> dict[str, Any]:
    values: dict[str, Any] = {"model": identity.describe_model(model.module.config.to_dict()), "model_id": model.model_id}
    if state.is_lora:
        values["adapter"] = identity.describe_adapter(model.lora.configs[state.name].to_dict())
        values["base_steps"] = model.lora.base_steps
        values["base_samples"] = _base_samples(model)
    return values


def _template(state: "AdapterState") -> dict[str, Any]:
    """Return what `twinkle chat` needs to make the template anew; options that JSON cannot hold are left out with a warning."""
    if state.template is None or (name := registry.name_of("templates", type(state.template))) is None:
        return {}
    options = state.template.options()
    try:
        return {"name": name, "options": json.loads(json.dumps(options))}
    except (TypeError, ValueError):
        del options["variables"]  # the others are texts and switches
        warn(f"The `variables=` of the template `{name}` are not plain values, so the checkpoint does not hold them. Say them "
             "again where it is used.")
        return {"name": name, "options": options}


def _other_base(model: "TransformersModel | WholeModel", state: "AdapterState", folder: Path, manifest: Manifest) -> str:
    """Return what is wrong if an adapter was trained on other weights than the model has, else ""."""
    saved = manifest.identity.get("base_samples", {})
    if not state.is_lora or not identity.differs(saved, _base_samples(model)):
        return ""
    if steps := manifest.identity.get("base_steps"):
        return (f"`{folder}` is an adapter of `{manifest.identity.get('model_id')}` after {steps} steps of training the whole "
                "model, whose weights this model does not have: begin with the checkpoint of the whole model, "
                "`TransformersModel(model_id=<its folder>)`.")
    return (f"`{folder}` is an adapter of `{manifest.identity.get('model_id')}`, whose weights are not those of "
            f"`{model.model_id}`, though the sizes are the same.")


def _base_samples(model: "TransformersModel | WholeModel") -> dict[str, float]:
    samples = model.base_samples if isinstance(model, WholeModel) else None
    return identity.sample_weights(plain_weights(model.module)) if samples is None else samples


def _source(model: "TransformersModel | WholeModel") -> Path | None:
    folder = Path(model.module.name_or_path)
    return folder if folder.is_dir() else None


def _base_name(model: "TransformersModel | WholeModel") -> str:
    """Return what peft and others find the base model by: the id on its hub, or the folder."""
    location = parse_uri(model.model_id)
    return location.repo_id if location.scheme in ("hf", "ms") else str(_source(model) or model.model_id)


def _near(path: Path) -> str:
    """Return " Did you mean ...?" with checkpoints beside `path`, "" if there is none."""
    if not path.parent.is_dir():
        return ""
    beside = [entry.name for entry in path.parent.iterdir() if is_checkpoint(entry)]
    return did_you_mean(path.name, beside)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
