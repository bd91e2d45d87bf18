"""The weights in safetensors files, by the names of a module's parameters, read slice by slice.

Which tensor of the files becomes which parameter is said by transformers' own conversions (names of a vision-language layout, one
file tensor an expert), so whatever transformers loads is found here. Files are mapped into memory, and of what is read only the
piece that is being copied is held. Where a parameter is made of several tensors, experts stacked along dim 0 are converted one by
one; any other conversion makes the whole parameter, one at a time, of which a slice is taken.

Who reads which slice is left to the caller.
"""

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils.loading_report import LoadStateDictInfo

from twinkle_core.errors import CheckpointError, ModelError

CHUNK_BYTES = 16 * 2**20
"""Of a file are held at once where the dtype changes: small beside a layer, large beside the cost of a call."""


@dataclass
class _Recipe:
    """How a parameter comes out of the files.

    Attributes:
        name: of the parameter, or of the first of several that one conversion makes.
        conversion: None for a tensor that is taken as it is.
        sources: (pattern of the conversion, name in the files), in transformers' order.
    """

    name: str
    conversion: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_stack(self) -> bool:
        """Whether row i along dim 0 comes of the i-th tensor of each pattern alone."""
        first, *others = self.conversion.operations if self.conversion is not None else [None]
        return (isinstance(first, MergeModulelist) and first.dim == 0 and len(self.conversion.target_patterns) == 1  # type: ignore[union-attr]
                and all(isinstance(other, Concatenate) and other.dim > 0 for other in others))


class TensorFiles:
    """Safetensors files, mapped into memory.

    Attributes:
        names: of all tensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._opened: dict[Path, Any] = {}
        self._places = {name: path for path in files for name in self._file(path).keys()}  # noqa: SIM118
        self.names = self._places.keys()

    def close(self) -> None:
        """Let go of the files; they are opened again when they are needed."""
        self._opened.clear()

    def hollow(self, name: str) -> torch.Tensor:
        """Return a tensor's shape and dtype, without memory."""
        part = self._slice(name)
        return torch.empty(part.get_shape(), dtype=str_to_torch_dtype[part.get_dtype()], device="meta")

    def whole(self, name: str, through: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor, in another dtype if one is said; else it lies in the file."""
        tensor = self._file(self._places[name]).get_tensor(name)
        return tensor if through is None else tensor.to(through)

    def copy(self, name: str, start: Sequence[int], into: torch.Tensor, *, through: torch.dtype | None = None) -> None:
        """Copy the part of a tensor that begins at `start`, one number a dim, and has the shape of `into`."""
        if not into.ndim:
            into.copy_(self.whole(name, through))
            return
        part, inner = self._slice(name), _region(start[1:], into.shape[1:])
        for begin, end in _pieces(into.shape, into.element_size()):
            piece = part[(slice(start[0] + begin, start[0] + end), *inner)]
            into[begin:end].copy_(piece if through is None else piece.to(through))

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same values."""
        slices = self._slice(one), self._slice(other)
        shape = slices[0].get_shape()
        return shape == slices[1].get_shape() and all(
            torch.equal(*(part[begin:end] for part in slices)) for begin, end in _pieces(shape, 8))

    def _slice(self, name: str) -> Any:
        return self._file(self._places[name]).get_slice(name)

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"`{path}` cannot be read: {error}. The file is damaged: fetch or save it again.") from error
        return self._opened[path]


class FileWeights:
    """The weights of one model in its files.

    Args:
        module: whose parameters are looked for, with whole shapes; on the meta device for all that matters here.
        files: safetensors files.
        conversions: transformers' for this module (`get_model_conversion_mapping`).

    Attributes:
        info: what is missing, unexpected, or of another shape, as transformers reports it.
    """

    def __init__(self, module: Any, files: Iterable[Path], conversions: Sequence[WeightTransform]) -> None:
        self._module, self._files = module, TensorFiles(files)
        self._recipes: dict[str, _Recipe] = {}
        self.info = LoadStateDictInfo(missing_keys=set(module.state_dict()), unexpected_keys=set(), mismatched_keys=set(),
                                      error_msgs=[], conversion_errors={}, skipped_pp_keys=set())
        for recipe in self._find(conversions):
            self._note(recipe)

    def __contains__(self, name: str) -> bool:
        return name in self._recipes

    def close(self) -> None:
        """Let go of the files; they are opened again when they are needed."""
        self._files.close()

    def call_alike(self, groups: Iterable[Sequence[str]]) -> None:
        """Find each parameter under all names of its group: tied ones are in the files once."""
        for names in groups:
            found = next((self._recipes[name] for name in names if name in self._recipes), None)
            if found is not None:
                self._recipes.update(dict.fromkeys((name for name in names if name not in self._recipes), found))

    def leave_out(self, name: str) -> None:
        """Take a parameter for one that the files do not have."""
        del self._recipes[name]
        self.info.missing_keys.add(name)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two parameters that the files hold as they are have the same values."""
        recipes = self._recipes[one], self._recipes[other]
        return all(recipe.conversion is None for recipe in recipes) and self._files.are_equal(
            *(recipe.sources[0][1] for recipe in recipes))

    def copy(self, name: str, start: Sequence[int], into: torch.Tensor, *, through: torch.dtype | None = None) -> None:
        """Copy the part of a parameter that begins at `start`, one number a dim, and has the shape of `into`.

        `through`: the dtype that values take on their way, so that they are rounded as they would be in a whole load.
        """
        recipe = self._recipes[name]
        with torch.no_grad():
            if recipe.conversion is None:
                self._files.copy(recipe.sources[0][1], start, into, through=through)
            elif recipe.is_stack:
                for row in range(into.shape[0]):
                    made = self._convert(recipe, [(pattern, self._files.whole(source, through))
                                                  for pattern, source in self._row(recipe, start[0] + row)])
                    into[row].copy_(made[name][0][_region(start[1:], into.shape[1:])])
            else:
                made = self._convert(recipe, [(pattern, self._files.whole(source, through)) for pattern, source in recipe.sources])
                into.copy_(made[name][_region(start, into.shape)])

    def _find(self, conversions: Sequence[WeightTransform]) -> list[_Recipe]:
        """Sort the tensors of the files into recipes, with the rules and in the order that transformers has."""
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        expected, prefix = self._module.state_dict(), self._module.base_model_prefix
        found: dict[str, _Recipe] = {}
        for source in sorted(self._files.names, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, expected)
            if name not in expected and source in expected:
                name, pattern = rename_source_key(source, [], [], prefix, expected)
            converter = None if pattern is None else by_pattern[pattern]
            if name in expected:
                found.setdefault(name, _Recipe(name, converter)).sources.append((pattern or source, source))
            elif converter is None:
                self.info.unexpected_keys.add(name)
            else:
                self.info.unexpected_keys |= {name.replace(converter.target_patterns[0], k) for k in converter.target_patterns}
        return list(found.values())

    def _note(self, recipe: _Recipe) -> None:
        """Find out on hollow tensors which parameters a recipe makes, and hold their shapes against the module's."""
        if recipe.conversion is None:
            made = {recipe.name: self._files.hollow(recipe.sources[0][1])}
        else:
            try:
                made = self._convert(
                    recipe, [(pattern, self._files.hollow(source)) for pattern, source in recipe.sources], self.info)
            except SkipParameters:  # transformers has noted the error, and will report it
                return
        expected = self._module.state_dict()
        for name, tensor in made.items():
            if name not in expected:
                self.info.unexpected_keys.add(name)
                continue
            self.info.missing_keys.discard(name)
            self._recipes[name] = recipe
            if tensor.shape != expected[name].shape:
                self.info.mismatched_keys.add((name, tensor.shape, expected[name].shape))  # type: ignore[arg-type]  any length

    def _convert(
        self, recipe: _Recipe, sources: Sequence[tuple[str, torch.Tensor]], info: LoadStateDictInfo | None = None,
    ) -> dict[str, torch.Tensor]:
        conversion = deepcopy(recipe.conversion)
        if conversion is None:
            raise ModelError(f"`{recipe.name}` is not converted.")
        for pattern, tensor in sources:
            conversion.collected_tensors[pattern].append(tensor)  # type: ignore[arg-type]  transformers takes both futures and tensors
        made: dict[str, Any] = conversion.convert(recipe.name, model=self._module, config=self._module.config, loading_info=info)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _row(self, recipe: _Recipe, row: int) -> list[tuple[str, str]]:
        by_pattern: dict[str, list[str]] = {}
        for pattern, source in recipe.sources:
            by_pattern.setdefault(pattern, []).append(source)
        return [(pattern, sources[row]) for pattern, sources in by_pattern.items()]


def _region(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))


def _pieces(shape: Sequence[int], element_bytes: int) -> list[tuple[int, int]]:
    """Return (begin, end) along dim 0 of pieces of at most `CHUNK_BYTES`, or of one row."""
    rows = max(1, CHUNK_BYTES // max(1, element_bytes * math.prod(shape[1:])))
    return [(begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows)]


def names_of_one(module: Any) -> list[list[str]]:
    """Return the names of each parameter and buffer: several where it is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
