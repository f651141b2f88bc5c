"""From a tensor and a cast to the factor of a product, and from what was saved back to one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import kernels, philox, rounding, scaling
from narrowgauge.numerics.formats import TF32
from narrowgauge.numerics.scaling import NVFP4, Delayed
from narrowgauge.numerics.tally import Tally
from narrowgauge.ops.backends import Backend
from narrowgauge.ops.casts import LinearCasts, OperandCast
from narrowgauge.ops.matmul import Factor
from narrowgauge.ops.parted import NOTHING_PARTED, PartedOperand
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.ops.tallies import complete, counts
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.quantized import QuantizedTensor


class DelayedSlots(NamedTuple):
    """Views of one role's delayed-scaling state: the scale in force, and the amax history with its live slot 0.

    rolls: the rolls so far, 0-dimensional int64, where a warm-up may last; None: there is none, or it is over.
    """

    quant_scale: Tensor  # 0-dimensional float32
    history: Tensor  # float32 [L]
    rolls: Tensor | None = None

    def of_expert(self, expert: int) -> DelayedSlots:
        """The views of one expert, where these are of all: quant_scale [E], history [E, L], rolls [E]."""
        return DelayedSlots(*(None if view is None else view[expert] for view in self))  # type: ignore[arg-type]

    def scale_for(self, x: Tensor, spec: CastSpec, reducer: Reducer) -> Tensor:
        """What `x` is multiplied by before its cast: the scale in force, or in a warm-up that of `x` itself.

        reducer: over the processes that hold parts of the operand, of which `x` is one.
        """
        if self.rolls is None:
            return self.quant_scale
        assert isinstance(spec.scale, Delayed)
        amax = reducer.max_(x.amax.clone() if isinstance(x, QuantizedTensor) else scaling.tensor_amax(x))
        current = scaling.delayed_scale_of(amax, self.quant_scale, spec.format, spec.scale)
        return torch.where(self.rolls < spec.scale.warmup, current, self.quant_scale)


class Counter(Protocol):
    """Takes what the casts of a sampled step did to each role's tensor. has_bins: whether it wants exponents, too."""

    has_bins: bool

    def add(self, role: str, tally: Tally) -> None:
        """Take the tally of one cast; its counts may be tensors, so that no device is waited for."""
        ...


class Cast(NamedTuple):
    """A matrix cast for products: its codes, its values in a carrier dtype, or both.

    x ~ codes * block_scale * dequant_scale ~ carrier * dequant_scale. block_scale: one for each tile, as it is stored;
    None for a cast per tensor. quant_scale: in a store, the delayed scale that it was cast with, else None. tally: what
    the cast did to the values, where asked for.
    """

    codes: Tensor | None
    carrier: Tensor | None
    dequant_scale: Tensor | None
    spec: CastSpec
    amax: Tensor | None = None
    quant_scale: Tensor | None = None
    block_scale: Tensor | None = None
    tally: Tally | None = None

    def unscaled(self) -> Tensor:
        """What the cast made of its operand, without `dequant_scale`."""
        if self.carrier is not None:
            return self.carrier
        assert self.codes is not None
        return self._decoded(self.codes, torch.float32)

    def factor(self, backend: Backend) -> Factor:
        """The factor of a product on `backend`: codes for scaled_mm, else values that its carrier dtype holds."""
        if backend.carrier is None:
            assert self.codes is not None
            return Factor(self.codes, self.dequant_scale, self.spec, self.block_scale)
        values = self.carrier
        if values is None or values.dtype is not backend.carrier:
            assert self.codes is not None
            values = self._decoded(self.codes, backend.carrier)
        return Factor(values, self.dequant_scale, self.spec)

    def _decoded(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        fmt = self.spec.format
        if self.block_scale is not None:
            return kernels.dequantize_blocks(codes, self.block_scale, fmt, self.spec.granularity, dtype)
        return kernels.dequantize(codes, None, fmt, dtype) if fmt.is_narrow else codes


class Caster(NamedTuple):
    """Casts the operands of one call of a linear layer, and keeps the books: amax slots, counts, shared inputs.

    delayed: slots of the roles with a delayed scale. record: whether live slots are raised. counter: told of every
    counted cast. shared: casts of inputs by sibling layers. weight_spec: how a quantized weight is stored. key: source
    of the random bits of stochastic casts, see `philox`; None where there is none. parted: of the roles whose matrix is
    parted over processes, how.
    """

    delayed: Mapping[str, DelayedSlots]
    record: bool
    counter: Counter | None
    shared: SharedInputs[Cast] | None
    weight_spec: CastSpec | None = None
    key: Tensor | None = None
    parted: Mapping[str, PartedOperand] = NOTHING_PARTED

    def cast(
        self,
        role: str,
        x: Tensor,
        how: OperandCast,
        *,
        keep_codes: bool,
        carrier: torch.dtype | None,
        counted: bool = True,
        source: Tensor | None = None,
    ) -> Cast:
        """Cast `x`, the matrix of the operand `role`, and raise the role's live amax.

        keep_codes: whether the codes are needed beside the carrier. counted: whether the counter is told. source: the
        tensor that `x` is a view of, under which siblings find the cast; None: it is not shared.
        Raises RecipeError where a delayed cast has no slots.
        """
        spec = how.spec
        slots = self.delayed.get(role) if spec.is_delayed else None
        if spec.is_delayed and slots is None:
            raise RecipeError(f"{role} is cast by '{spec}': expected its slots in `delayed`, found none")
        parted = self.parted.get(role)
        reducer = SINGLE_PROCESS if parted is None else parted.reducer
        quant_scale = None if slots is None else slots.scale_for(x, spec, reducer)
        counter = self.counter if counted else None

        def make() -> Cast:
            values = x if how.hadamard is None else kernels.transform(plain(x), how.hadamard.signs)
            done = cast_by(
                values,
                spec,
                quant_scale,
                keep_codes=keep_codes,
                carrier=carrier,
                count=counter is not None,
                stored=self.weight_spec if role == "weight" else None,
                key=self.key,
                stream=how.stream,
                amax=None if parted is None else functools.partial(parted.amax, spec=spec),
            )
            if counter is not None and done.tally is not None:
                complete(done, plain(values), counter.has_bins)
            return done

        if self.shared is None or source is None:
            done = make()
        else:
            done = _shared(
                self.shared,
                source,
                (spec, how.hadamard, keep_codes, carrier, None if counter is None else counter.has_bins),
                quant_scale,
                make,
            )
        if counter is not None and done.tally is not None:
            counter.add(role, done.tally)
        if self.record and slots is not None and done.amax is not None:
            live = slots.history[:1]
            live.copy_(torch.maximum(live, done.amax))  # maximum keeps NaN, and repeating it changes nothing
        return done


def key_of_call(
    casts: LinearCasts, x: Tensor, weight: Tensor, generator: torch.Generator | None, training: bool
) -> Tensor | None:
    """The key of one call's stochastic casts, None where it has none: another one on each rank of a process group.

    generator: its source; None: torch's default one of the device, the only one that compiled code knows. training:
    whether a backward may follow even where no gradients are asked for: an activation checkpoint recomputes the call
    from the random state that it began with, so that a key must be drawn in both.
    """
    if not casts.needs_key(backward=training or torch.is_grad_enabled()):
        return None
    if generator is None and torch.compiler.is_compiling():
        key = torch.ops.narrowgauge.draw_key(x, weight)
    else:
        key = philox.draw_key(x.device, generator)
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return key + torch.distributed.get_rank() if is_one_of_many else key


def _shared(
    store: SharedInputs[Cast],
    source: Tensor,
    key: tuple[object, ...],
    quant_scale: Tensor | None,
    make: Callable[[], Cast],
) -> Cast:
    """A sibling's cast of the same tensor by the same spec and scale, else one made now for the siblings to find."""
    found = store.get(source, key)
    if found is not None and quant_scale is not None:
        # comparing two delayed scales is free on a CPU only; elsewhere it would wait for the device at every layer
        used = found.quant_scale
        if used is None or not used.is_cpu or not torch.equal(used, quant_scale):
            found = None
    if found is None:
        # a delayed scale lives in a buffer that the next roll overwrites: what was used is kept
        found = make()._replace(quant_scale=None if quant_scale is None else quant_scale.clone())
        store.put(source, key, found)
    return found


def cast_by(
    x: Tensor,
    spec: CastSpec,
    quant_scale: Tensor | None,
    *,
    keep_codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    stored: CastSpec | None = None,
    key: Tensor | None = None,
    stream: int = 0,
    amax: Callable[[Tensor], Tensor | None] | None = None,
) -> Cast:
    """Cast a matrix by `spec`; quant_scale: the delayed scale, or None. Codes are kept where there is no carrier.

    stored: how `x` is stored, where it is a QuantizedTensor; left out, it is asked. key, stream: as in `cast_operand`.
    amax: gives that function's, for values of which `x` are a part; None: there is no more than `x`.
    """
    if isinstance(x, QuantizedTensor):
        kept = _stored_codes(x, spec, x.spec if stored is None else stored, count)
        if kept is not None:
            return kept
        # compiled code cannot ask a tensor for its spec
        if count or amax is not None or not spec.is_scaled or torch.compiler.is_compiling():
            x = x.dequantize()
    if not spec.is_scaled and not spec.format.is_narrow and not spec.is_stochastic:
        return _cast_wide(x, spec, count)
    keep_codes = keep_codes or carrier is None
    done = cast_operand(
        x,
        spec,
        quant_scale,
        keep_codes=keep_codes,
        carrier=carrier,
        count=count,
        key=key,
        stream=stream,
        amax=None if amax is None else amax(x),
    )
    dequant_scale = done.dequant_scale
    if spec.is_scaled and done.amax is not None and spec.format.saturating:
        # the cast has saturated an infinity: the product must still show it, or no loss scaler or guard would see it
        dequant_scale = torch.where(done.amax.isfinite(), 1.0 if dequant_scale is None else dequant_scale, done.amax)
    tally = counts(x, done.saturated, done.flushed) if count else None
    return Cast(done.codes, done.carrier, dequant_scale, spec, done.amax, None, done.block_scale, tally)


def _stored_codes(x: QuantizedTensor, spec: CastSpec, stored: CastSpec, count: bool) -> Cast | None:
    """The codes of `x` as the operand, where casting their values to the same format again could only lose."""
    if stored.format != spec.format:
        return None
    in_blocks = stored.in_blocks or spec.in_blocks
    if in_blocks and (stored != spec or x.ndim != 2):
        return None
    factor = x.dequant_scale if not in_blocks else scaling.nvfp4_tensor_factor(x.amax) if spec.scale is NVFP4 else None
    if stored.is_scaled:  # an infinity has saturated: as below
        factor = torch.where(x.amax.isfinite(), 1.0 if factor is None else factor, x.amax)
    amax = x.amax if count or spec.is_delayed else None
    tally = counts(x, 0, 0) if count else None
    return Cast(x.codes, None, factor, spec, amax, None, x.dequant_scale if in_blocks else None, tally)


def _cast_wide(x: Tensor, spec: CastSpec, count: bool) -> Cast:
    """Cast to an unscaled wide format: by torch's own cast, which overflows as IEEE 754 does."""
    fmt = spec.format
    codes = rounding.encode(x, fmt) if fmt is TF32 else x.to(fmt.dtype)
    if not count:
        return Cast(codes, None, None, spec)
    saturated, flushed = (x.float().abs() > fmt.max).sum(), ((x != 0) & (codes == 0)).sum()
    return Cast(codes, None, None, spec, scaling.tensor_amax(x), tally=counts(x, saturated, flushed))


def plain(x: Tensor) -> Tensor:
    """The values of a QuantizedTensor; any other tensor as it is."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
