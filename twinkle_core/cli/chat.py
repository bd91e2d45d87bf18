"""Talk to a model or a checkpoint.

Finds out what TARGET is (a model, a full-parameter checkpoint, a LoRA and its base model, or a folder of checkpoints), and prints
each answer as it is sampled. On a terminal it asks; otherwise each line of the input is one turn. Sampling is `TorchSampler`'s.
"""

import contextlib
import json
import secrets
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinkle_core import registry
from twinkle_core.errors import ArgumentError, MissingExtraError, SamplerError, TemplateError, UsageError

if TYPE_CHECKING:
    from twinkle_core.hub import Location
    from twinkle_core.sampler.torch_sampler import TorchSampler
    from twinkle_core.template.template import Template

_COMMANDS = "/new begins a new conversation, /help shows this, /exit or Ctrl-D ends"


@dataclass(frozen=True)
class Target:
    """What to sample from: a model, the LoRA on top of it, and name and options of the template, as far as a checkpoint says so."""

    model_id: str
    adapter_uri: str | None = None
    template: Mapping[str, Any] = field(default_factory=lambda: dict[str, Any]())


def chat(
    target: Annotated[str, typer.Argument(
        help="A checkpoint, a folder of checkpoints (its newest is taken), or a model: ms://org/name, hf://org/name, tiny://name.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model of a LoRA, if it is not the one that the LoRA names.")] = None,
    template: Annotated[str | None, typer.Option(
        help="Chat template. Default: that of the training, with its options, else of the model's family.")] = None,
    thinking: Annotated[bool | None, typer.Option(help="Switch reasoning on or off, where the model has a switch.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; -1: all.")] = -1,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ... Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights, e.g. bfloat16. Default: the checkpoint's.")] = None,
    trust_remote_code: Annotated[bool | None, typer.Option(help="Let code that ships with the model run.")] = None,
) -> None:
    """Talk to a model or a checkpoint."""
    from twinkle_core.data_format import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty,
        seed=secrets.randbits(31) if seed is None else seed)
    if prompt is None and sys.stdin is None:
        raise UsageError("There is nothing to answer: standard input is closed. Say something with `--prompt`.")
    found = find_target(target, base=base)
    _quieten()
    sampler: TorchSampler = registry.resolve("samplers", "TorchSampler")(
        found.model_id, device=device, dtype=dtype, trust_remote_code=trust_remote_code, max_cached_adapters=1)
    name = template or found.template.get("name") or template_of(sampler.model.config)
    options = dict(found.template.get("options", {})) if name == found.template.get("name") else {}
    options |= {key: value for key, value in (("default_system", system), ("enable_thinking", thinking)) if value is not None}
    made: Template = registry.resolve("templates", name)(found.model_id, trust_remote_code=trust_remote_code, **options)
    sampler.set_template(made)
    talk = Conversation(sampler, made, params, found.adapter_uri)
    is_asking = prompt is None and sys.stdin.isatty()
    try:
        if prompt is not None:
            talk.say(prompt)
        elif is_asking:
            _ask(talk)
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.say(line.strip())
    except KeyboardInterrupt:
        print()
        if not is_asking:  # where a conversation ends by Ctrl-C, an answer that somebody waits for is broken off
            raise


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(self, sampler: "TorchSampler", template: "Template", params: Any, adapter_uri: str | None) -> None:
        self._sampler, self._template, self._params, self._adapter_uri = sampler, template, params, adapter_uri
        self.messages: list[Any] = []

    def say(self, text: str) -> None:
        """Add a user's turn, and print the answer while it is sampled. An error leaves what was said before as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        response = self._sampler.stream({"messages": messages}, self._params, on_text=_show, adapter_uri=self._adapter_uri)
        print()
        sequence = response.sequences[0]
        if not sequence.decoded.strip():
            print("(The answer is empty. A model that was trained without reasoning may need --no-thinking.)", file=sys.stderr)
        if sequence.stop_reason == "length":
            print(f"(The answer was cut after {len(sequence.tokens)} tokens; see --max-tokens.)", file=sys.stderr)
        self.messages = [*messages, self._template.parse(sequence.tokens)]


def find_target(target: str, *, base: str | None = None) -> Target:
    """Return what `target` means: a URI or path of a model or LoRA, or a folder of checkpoints.

    Raises: `ArgumentError` if a folder holds neither, or a LoRA does not name its base model; `HubError`.
    """
    from twinkle_core.checkpoint.folder import newest_complete
    from twinkle_core.hub import parse_uri, resolve_model
    from twinkle_core.hub.local import expand_home

    location = parse_uri(target)
    folder = expand_home(location.repo_id) if location.scheme == "file" else resolve_model(target)
    if (folder / "adapter_config.json").is_file():
        return Target(base or _trained_on(folder) or _base_of(folder / "adapter_config.json"), str(folder), _template_said(folder))
    if base is not None:
        raise ArgumentError(f"`--base {base}` is for a LoRA, but `{target}` has no `adapter_config.json`. Leave it out.")
    if (folder / "config.json").is_file() or not folder.is_dir():
        return Target(target, template=_template_said(folder))
    newest = newest_complete(folder)
    if newest is None:
        raise ArgumentError(f"`{target}` holds neither a model (`config.json`), nor a LoRA (`adapter_config.json`), nor complete "
                            "checkpoints. Pass what `save` returned, or the id of a model.")
    print(f"Newest checkpoint: {newest}", file=sys.stderr)
    return find_target(str(newest), base=base)


def template_of(config: Any) -> str:
    """Return the name of the template that fits a model: its family's, else `Template`."""
    families = registry.names("model_families")
    types = [config.model_type, config.get_text_config().model_type]
    found = next((model_type for model_type in types if model_type in families), None)
    return registry.resolve("model_families", found).template if found is not None else "Template"


def _template_said(folder: Path) -> dict[str, Any]:
    """Return name and options of the template that a checkpoint was trained with; {} where it does not say so."""
    from twinkle_core.checkpoint.folder import is_checkpoint
    from twinkle_core.checkpoint.manifest import read_manifest

    return read_manifest(folder).template if is_checkpoint(folder) else {}


def _trained_on(folder: Path) -> str | None:
    """Return the model that a Twinkle checkpoint was trained on, as the script named it; None of another LoRA, or if it is gone."""
    from twinkle_core.checkpoint.folder import is_checkpoint
    from twinkle_core.checkpoint.manifest import read_manifest
    from twinkle_core.hub import parse_uri
    from twinkle_core.hub.local import exists, expand_home

    name = read_manifest(folder).identity.get("model_id") if is_checkpoint(folder) else None
    if not isinstance(name, str):
        return None
    location = parse_uri(name)
    return name if location.scheme != "file" or exists(expand_home(location.repo_id)) else None


def _base_of(path: Path) -> str:
    """Return the model that an adapter's config names: a URI or path, or a bare `org/name`, which is looked for in caches only."""
    from twinkle_core.hub import parse_uri

    try:
        name = json.loads(path.read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise SamplerError(f"{path} cannot be read: {error}. Save the adapter again.") from error
    if not name:
        raise ArgumentError(f"{path} does not name the model that the LoRA belongs to. Say it: --base ms://org/name")
    if "://" in name or Path(name).exists():
        return name
    cached = [uri for uri in (f"ms://{name}", f"hf://{name}") if _is_cached(parse_uri(uri))]
    if not cached:
        raise ArgumentError(f"The LoRA belongs to `{name}`, which is no folder here and in no hub's cache. Say where it is: "
                            f"--base ms://{name} (ModelScope), --base hf://{name} (Hugging Face), or a folder.")
    return cached[0]


def _is_cached(location: "Location") -> bool:
    hub = registry.resolve("hubs", location.scheme)()
    try:
        return hub.find_cached(location.repo_id, kind="model") is not None
    except MissingExtraError:  # without its client a hub has no cache
        return False


def _ask(talk: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and history, where Python was built with it
    print(f"({_COMMANDS})", file=sys.stderr)
    for line in _lines():
        if line == "/new":
            talk.messages = []
        elif line == "/help":
            print(f"({_COMMANDS})", file=sys.stderr)
        else:
            try:
                talk.say(line)
            except (SamplerError, TemplateError) as error:  # such as a conversation that has become too long
                print(f"{type(error).__name__}: {error} ({_COMMANDS})", file=sys.stderr)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line:
            yield line


def _show(text: str) -> None:
    """Print a piece of an answer. Control characters, with which a model could move the cursor, become their escapes."""
    print("".join(_visible(character) for character in text), end="", flush=True)


def _visible(character: str) -> str:
    is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return repr(character)[1:-1] if is_control else character


def _quieten() -> None:
    """Keep notes about kernels and such out of the conversation."""
    try:
        from transformers.utils import logging
    except ImportError:  # the sampler says what to install
        return
    logging.set_verbosity_error()
