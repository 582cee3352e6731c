"""A trace as one rank of a sharded run sees it: cut weights, gradients and state, and the buffers they travel in.

The tape of a single device is rewritten before its layers are unrolled, so that allocator replay, categories, holders
and timeline follow by themselves. Each layer's stretch of forward and of backward gets what the engine holds then:

* the gathered weights, and the flat buffer they arrive in (FSDP2 keeps it until the next gather);
* in backward also the buffer of the next gather, which is already on its way, and the reduce-scatter's input;
* whole gradients until the layer's backward is done, then the rank's share.

What belongs to no layer (embedding, last norm, output head) is FSDP2's root group: gathered once per pass and kept.

Source:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``unshard``, ``_prefetch_unshard``, ``post_backward``,
    ``reduce_scatter_state``); torch/nn/parallel/distributed.py and reducer.cpp (DDP's buckets hold a second copy of the
    gradients); deepspeed/runtime/zero/stage_1_and_2.py (``single_partition_of_fp32_groups``, ``ipg_buffer``).
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from dataclasses import dataclass

from .tape import NO_LAYER, Tape

# Elements DeepSpeed collects before it reduces or gathers; written into the file that `workbench launch` makes.
DEEPSPEED_BUCKET_ELEMENTS = 50_000_000
# Shares are padded so that every rank has the same, in bytes.
_PADDING = 16
_STEP_SEGMENTS = ("step", "step_again")
# Scalars (step counts, norms) are not cut.
_SMALLEST_CUT = 512


@dataclass(frozen=True)
class Cut:
    """What a rank's share is.

    Attributes:
        ranks: Ranks that hold one whole between them.
        cuts: Of ``"state"``, ``"gradient"`` and ``"parameter"``, what is cut.
        engine: ``"ddp"``, ``"fsdp"`` or ``"deepspeed"``: whose buffers there are.
    """

    ranks: int
    cuts: frozenset[str]
    engine: str

    def share(self, num_bytes: int) -> int:
        """Return the bytes of one rank's share."""
        share = -(-num_bytes // self.ranks)
        return -(-share // _PADDING) * _PADDING


@dataclass
class _Stretch:
    """Where the code of one layer runs in one pass: its first and last event."""

    begin: int
    end: int
    phase: int


def shard_tape(tape: Tape, cut: Cut, num_copies: int = 0, period: int = 1) -> Tape:
    """Return the tape of one rank.

    Args:
        tape: Of a single device, with few layers or all.
        cut: Who holds what.
        num_copies: Periods of layers that unrolling will add; they decide how large DeepSpeed's buckets become.
        period: Layers of a period.
    """
    return _Sharder(tape, cut, num_copies, period).run()


def parameter_tokens(tape: Tape) -> list[int]:
    """Return the tokens of weights, packed or not, that live through the run."""
    ended = {~event for event in tape.events[: _start_of(tape, "first")] if event < 0}
    names = tape.operator_names
    return [
        token
        for token in tape.events[: _start_of(tape, "first")]
        if token >= 0 and token not in ended and names[tape.operators[token]] in ("parameter", "quant_state")
    ]


def _start_of(tape: Tape, segment: str) -> int:
    return tape.segments()[segment][0]


class _Sharder:
    def __init__(self, tape: Tape, cut: Cut, num_copies: int, period: int) -> None:
        self.old, self.cut, self.num_copies, self.period = tape, cut, num_copies, period
        self.tape = copy.copy(tape)
        for name in ("events", "event_layers", "sizes", "modules", "operators", "layers", "phases", "operator_names"):
            setattr(self.tape, name, list(getattr(tape, name)))
        self.tape.categories = dict(tape.categories)
        self.before: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.after: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.replaced: dict[int, int] = {}
        self.segments = tape.segments()
        self.parameters = parameter_tokens(tape)
        self.gradients = [token for token, name in tape.categories.items() if name == "gradient"]

    def run(self) -> Tape:
        cuts, engine = self.cut.cuts, self.cut.engine
        weights = self._sizes_by_layer(self.parameters)
        gradients = self._sizes_by_layer(self.gradients)
        if "parameter" in cuts:
            self._gather(weights, gradients)
            for token in self.parameters:
                self.tape.sizes[token] = self.cut.share(self.tape.sizes[token])
        if "gradient" in cuts:
            self._cut_gradients()
        if engine == "ddp":
            self._add_once(gradients, "ddp.bucket", "gradient")
        if engine == "deepspeed":
            shares = {layer: self.cut.share(size) for layer, size in gradients.items()}
            self._add_once(shares, "deepspeed.fp32_partition", "optimizer_state")
            if "parameter" not in cuts:
                self._add_buckets(gradients)
        if "state" in cuts:
            self._cut_state()
        return self._rebuilt()

    def _sizes_by_layer(self, tokens: list[int]) -> dict[int, int]:
        sums: dict[int, int] = defaultdict(int)
        for token in tokens:
            sums[self.old.layers[token]] += self.old.sizes[token]
        return dict(sums)

    # -- what is added ---------------------------------------------------------------------------------------------

    def _new(self, num_bytes: int, operator: str, layer: int, phase: int, category: str) -> int:
        tape = self.tape
        if operator not in tape.operator_names:
            tape.operator_names.append(operator)
        tape.sizes.append(num_bytes)
        tape.modules.append(0)
        tape.operators.append(tape.operator_names.index(operator))
        tape.layers.append(layer)
        tape.phases.append(phase)
        token = len(tape.sizes) - 1
        tape.categories[token] = category
        return token

    def _add_over(self, stretch: _Stretch, num_bytes: int, operator: str, layer: int, category: str) -> None:
        """Add a storage that lives from a stretch's first event to its last."""
        if num_bytes:
            token = self._new(num_bytes, operator, layer, stretch.phase, category)
            self.before[stretch.begin].append((token, layer))
            self.after[stretch.end].append((~token, layer))

    def _add_once(self, sizes: dict[int, int], operator: str, category: str) -> None:
        """Add storages, one a layer, that live from before the first step to the end."""
        at = self.segments["first"][0] - 1
        for layer, num_bytes in sorted(sizes.items()):
            if num_bytes:
                token = self._new(num_bytes, operator, layer, self._phase_at(at), category)
                self.after[at].append((token, layer))

    def _add_buckets(self, gradients: dict[int, int]) -> None:
        """Add DeepSpeed's bucket, filled while backward goes on; two of them, since one is sent meanwhile."""
        template = sum(gradients.get(layer, 0) for layer in range(self.period, 2 * self.period))
        total = sum(gradients.values()) + self.num_copies * template
        num_bytes = 2 * min(total, 4 * DEEPSPEED_BUCKET_ELEMENTS)
        for name in ("first", "later"):
            if name in self.segments and num_bytes:
                begin, end = self.segments[name]
                stretch = _Stretch(begin, end - 1, self._phase_at(begin))
                self._add_over(stretch, num_bytes, "deepspeed.reduce_bucket", NO_LAYER, "temporary")

    def _gather(self, weights: dict[int, int], gradients: dict[int, int]) -> None:
        for name in ("first", "later", "evaluation"):
            if name not in self.segments:
                continue
            begin, end = self.segments[name]
            root = _Stretch(begin, end - 1, self._phase_at(begin))
            self._add_over(root, weights.get(NO_LAYER, 0), "fsdp.unsharded", NO_LAYER, "parameter")
            forward, backward = self._stretches(begin, end)
            for layer, stretch in forward.items():
                self._add_over(stretch, weights.get(layer, 0), "fsdp.unsharded", layer, "parameter")
                self._add_over(stretch, weights.get(layer, 0), "fsdp.all_gather", layer, "temporary")
            for layer, stretch in backward.items():
                size = weights.get(layer, 0)
                self._add_over(stretch, size, "fsdp.unsharded", layer, "parameter")
                self._add_over(stretch, size, "fsdp.all_gather", layer, "temporary")
                self._add_over(stretch, size, "fsdp.prefetch", layer, "temporary")
                self._add_over(stretch, gradients.get(layer, 0), "fsdp.reduce_scatter", layer, "temporary")

    def _stretches(self, begin: int, end: int) -> tuple[dict[int, _Stretch], dict[int, _Stretch]]:
        """Return each layer's stretch of the forward pass, and of backward with recomputation."""
        names = self.old.phase_names
        forward: dict[int, _Stretch] = {}
        backward: dict[int, _Stretch] = {}
        bounds = [*self.old.phase_marks, (len(self.old.events), 0)]
        for (start, phase), (stop, _) in itertools.pairwise(bounds):
            found = backward if names[phase] in ("backward", "recompute") else forward
            for index in range(max(start, begin), min(stop, end)):
                layer = self.old.event_layers[index]
                if layer == NO_LAYER:
                    continue
                known = found.get(layer)
                if known is None:
                    found[layer] = _Stretch(index, index, phase)
                else:
                    known.end = index
        return forward, backward

    # -- what is cut -----------------------------------------------------------------------------------------------

    def _cut_gradients(self) -> None:
        """Keep whole gradients until their layer's backward is done, and the share from then on."""
        begin, end = self.segments["first"]
        _, backward = self._stretches(begin, end)
        births = {self.old.events[index]: index for index in range(begin, end) if self.old.events[index] >= 0}
        for token in self.gradients:
            layer, at = self.old.layers[token], births[token]
            last = backward[layer].end if layer in backward else end - 1
            last = max(last, at)
            whole = self._new(
                self.old.sizes[token], "fsdp.whole_gradient", layer, self.old.phases[token], "autograd_detail"
            )
            self.tape.modules[whole] = self.old.modules[token]
            self.replaced[at] = whole
            self.after[last] += [(token, layer), (~whole, layer)]
            self.tape.sizes[token] = self.cut.share(self.old.sizes[token])

    def _cut_state(self) -> None:
        for name in _STEP_SEGMENTS:
            begin, end = self.segments[name]
            for event in self.old.events[begin:end]:
                if event >= 0 and self.old.sizes[event] > _SMALLEST_CUT and event not in self.old.growth:
                    self.tape.sizes[event] = self.cut.share(self.old.sizes[event])

    # -- the new tape ----------------------------------------------------------------------------------------------

    def _phase_at(self, index: int) -> int:
        found = 0
        for start, phase in self.old.phase_marks:
            if start > index:
                break
            found = phase
        return found

    def _rebuilt(self) -> Tape:
        old, tape = self.old, self.tape
        events: list[int] = []
        labels: list[int] = []
        moved: list[int] = []
        for index, (event, label) in enumerate(zip(old.events, old.event_layers, strict=True)):
            moved.append(len(events))
            for added, layer in self.before.get(index, ()):
                events.append(added)
                labels.append(layer)
            events.append(self.replaced.get(index, event))
            labels.append(label)
            for added, layer in self.after.get(index, ()):
                events.append(added)
                labels.append(layer)
        moved.append(len(events))
        tape.events, tape.event_layers = events, labels
        tape.marks = [(moved[index], name) for index, name in old.marks]
        tape.phase_marks = [(moved[index], phase) for index, phase in old.phase_marks]
        return tape
