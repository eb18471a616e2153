"""The form of a family in GGUF files: its name, metadata and tensor names.

A family declares its form beside its config (`max.pipelines.architectures.decoder_family`). Readers and writers of this
folder handle what all families share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.graph.weights import WeightData

if TYPE_CHECKING:
    from max.pipelines.gguf import metadata as gguf_metadata
else:
    gguf_metadata = lazy_module("max.pipelines.gguf.metadata")

__all__ = ["ExpertKeys", "GGUFForm", "Weights"]

Weights = Mapping[str, WeightData]
"""Weights by the decoder's names."""


@dataclass(frozen=True)
class ExpertKeys:
    """The keys of experts that the files of a family state.

    Args:
        weights: Whether files state the normalization and the factor of routing weights.
        scoring: Whether files state the function of routing scores.
        shared_count: Whether files state the number of shared experts beside the size of the shared MLP.
        dense_layers: How files tell the layers without experts. ``leading``: they state the number of first layers that
            have none, and other models are refused. ``tensors``: such a layer has no router tensor. ``written``:
            `GGUFForm.write` states them.
    """

    weights: bool = True
    scoring: bool = False
    shared_count: bool = False
    dense_layers: Literal["leading", "tensors", "written"] = "leading"


@dataclass(frozen=True)
class GGUFForm:
    """The form of a family in GGUF files.

    Args:
        name: llama.cpp's name of the architecture (``general.architecture``).
        model_type: The model type in config.json.
        keys: Maps Llama's names of config.json keys to the family's names.
        constants: Keys of config.json that files omit because all models of the family have the same value.
        marks: Metadata keys that tell the family from others of the same name, with their values; None: any value
            except 0. Of the forms that fit a file, the one with the most marks counts.
        lacks: Metadata keys that files of the family do not state, or state as 0.
        reads: Whether files are read as this family; else it is only written under the name.
        needs_epsilon: Whether files must state the epsilon of the norms.
        hybrid: Whether layers differ in kind: sizes may be lists by layer, or 0.
        by_layer: Metadata keys with a value per layer, which only `read` reads.
        read: Reads the keys of config.json that only this family states, or states differently.
        top: Names outside of layers, mapped to the decoder's names, as far as they differ from `GGUF_TOP`.
        layer: Parts of names within a layer, mapped to the decoder's parts, as far as they differ from `GGUF_LAYER`.
        alternative: Names as of `layer`, which apply if a file has all of them.
        stacks: Names, outside of layers, of tensors that stack one weight per index, mapped to the decoder's names
            before the index.
        conversions: Conversion functions of arrays, by the ends of the decoder's names, for weights that files store in
            another form.
        permuted: Whether files store the two elements of a rotated pair adjacently while checkpoints do not.
        fused_projections: Fused projections that files contain (``qkv_proj``, ``gate_up_proj``, ``in_proj_ba``).
        window_period: The distance between layers without a window that files need not state; None: all layers have
            the window.
        states_windows: Whether files state the layers with a window in any case.
        yarn_multiplier: The factor of YaRN's ``mscale_all_dim`` in files; 0: files do not state it.
        experts: The keys of experts that files state.
        prediction_layers: Whether llama.cpp's files of the family have the layers that predict further tokens.
        describes: Whether a config is written in this form; a class may have several.
        write: The metadata that only this family states, or states differently; keys lack the prefix ``name.``.
        split_weights: Separates the weights that files store as metadata, with whole keys, and converts others to those
            that files have.
        class_name: The name of the class in ``architectures`` of config.json; `decoder_family` sets its own where there
            is none. With that of another class, files of the form are read as models of that class.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    marks: Mapping[str, int | None] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    reads: bool = True
    needs_epsilon: bool = True
    hybrid: bool = False
    by_layer: tuple[str, ...] = ()
    read: Callable[[gguf_metadata.Metadata], dict[str, Any]] | None = None
    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    alternative: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    conversions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    permuted: bool = False
    fused_projections: tuple[str, ...] = ()
    window_period: int | None = None
    states_windows: bool = False
    yarn_multiplier: float = 0.0
    experts: ExpertKeys = ExpertKeys()
    prediction_layers: bool = False
    describes: Callable[[Any], bool] = lambda config: True
    write: Callable[[Any], dict[str, Any]] | None = None
    split_weights: (
        Callable[[Any, Weights], tuple[dict[str, list[float]], dict[str, WeightData]]] | None
    ) = None
    class_name: str = ""

    def fits(self, metadata: Mapping[str, object]) -> bool:
        """Whether a file may be read in this form.

        Args:
            metadata: The file's metadata.
        """

        def has(key: str, expected: int | None = None) -> bool:
            # files of dense models may state 0 experts
            value = metadata.get(f"{self.name}.{key}", 0)
            stated = not (isinstance(value, int) and value == 0)
            return stated and expected in (None, value)

        if not self.reads or any(map(has, self.lacks)):
            return False
        return all(has(key, value) for key, value in self.marks.items())
