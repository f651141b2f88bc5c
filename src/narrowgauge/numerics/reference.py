"""The scalar twin: casts and scales of one value in exact rational arithmetic, slow and plain.

Everything works on the bits of a float32 as a Python int. Each fast path is held against this module bit for bit;
`reference_blocks` builds matrices, tiles and the Hadamard transform on it.
"""

from __future__ import annotations

import functools
import math
import struct
from fractions import Fraction

from narrowgauge.numerics.companding import LINEAR, Companding, limit_of
from narrowgauge.numerics.formats import E8M0FNU, FP32, TF32, Format
from narrowgauge.numerics.scaling import ScaleRule

INFINITY = 0x7F800000
NAN = 0x7FC00000
SIGN = 0x80000000
FLT_MAX = 0x7F7FFFFF


def bits_of(value: float) -> int:
    """The bits of a Python float rounded to float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def float_of(bits: int) -> float:
    """The value that float32 bits stand for."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def encode(bits: int, fmt: Format, *, saturating: bool | None = None) -> int:
    """The code of a float32, given as its bits, by round to nearest even.

    `saturating` None: the format's own rule. Codes of signed integers are in two's complement, of one byte (INT16:
    two), TF32 codes are float32 bits. Raises ValueError for a value that the format cannot express: NaN without a NaN,
    overflow without infinity.
    """
    saturating = fmt.saturating if saturating is None else saturating
    negative, magnitude = bits >= SIGN, bits % SIGN
    if magnitude > INFINITY:
        if fmt.nan_code is None:
            raise ValueError(f"{fmt.name} has no NaN")
        code = fmt.nan_code << 13 if fmt is TF32 else fmt.nan_code
        return _with_sign(code, negative, fmt)
    if negative and not fmt.signed:
        negative, magnitude = False, 0
    if magnitude == INFINITY:
        return _with_sign(_overflow(fmt, saturating), negative, fmt)
    value = Fraction(float_of(magnitude))
    if saturating:
        value = min(value, Fraction(fmt.max))
    if fmt.is_integer:
        integer = round(value)  # Python rounds ties to even
        return (-integer if negative else integer) % _modulus(fmt)
    if fmt is E8M0FNU:
        return _encode_e8m0(value)
    code, rounded = _nearest(value, fmt)
    if rounded > fmt.max:
        return _with_sign(_overflow(fmt, saturating), negative, fmt)
    return _with_sign(code << 13 if fmt is TF32 else code, negative, fmt)


def encode_stochastically(bits: int, fmt: Format, word: int, *, saturating: bool | None = None) -> int:
    """The code of a float32, given as its bits, by stochastic rounding with a random word of 32 bits.

    A value between two neighbours takes the one of larger magnitude where the word's upper 24 bits, as a share of 2^24,
    are below the share of the gap that lies under the value. All else is as in `encode`.
    """
    magnitude = bits % SIGN
    value = Fraction(float_of(magnitude)) if magnitude < INFINITY else None
    if value is None or value > Fraction(fmt.max):
        return encode(bits, fmt, saturating=saturating)
    spacing = Fraction(1) if fmt.is_integer else _power(_exponent(value, fmt) - fmt.mantissa_bits)
    steps, rest = divmod(value, spacing)
    steps += Fraction(word >> 8, 1 << 24) < rest / spacing
    return encode((bits & SIGN) | bits_of(float(steps * spacing)), fmt, saturating=saturating)


def random_word(key: int, stream: int, index: int) -> int:
    """The random word of value `index` of a cast: `philox4x32` of counter (index // 4, stream), its word index % 4."""
    block, key = index // 4, key % (1 << 64)
    counter = (block % (1 << 32), block >> 32, stream, 0)
    return philox4x32(counter, (key % (1 << 32), key >> 32))[index % 4]


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011): four random words of 32 bits of a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = divmod(c0 * 0xD2511F53, 1 << 32), divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


@functools.cache
def decode(code: int, fmt: Format) -> int:
    """The float32 bits of the value of a code; every NaN gives the quiet NaN 0x7FC00000 (with the sign of the code)."""
    if fmt in (FP32, TF32):
        return code
    if fmt.is_integer:
        modulus = _modulus(fmt)
        return bits_of(code - modulus if fmt.signed and code >= modulus // 2 else code)
    if fmt is E8M0FNU:
        return NAN if code == 0xFF else bits_of(2.0 ** (code - fmt.bias))
    half = 1 << (fmt.bits - 1)
    sign = SIGN if code >= half else 0
    exponent, mantissa = (code % half) >> fmt.mantissa_bits, code % (1 << fmt.mantissa_bits)
    if fmt.has_inf and exponent == (1 << fmt.exponent_bits) - 1:
        return sign | (NAN if mantissa else INFINITY)
    if fmt.has_nan and code % half == fmt.nan_code:
        return sign | NAN
    steps = mantissa + (1 << fmt.mantissa_bits if exponent else 0)
    return sign | bits_of(float(steps * _power(max(exponent, 1) - fmt.bias - fmt.mantissa_bits)))


def quant_scale(amax: int, fmt: Format, rule: ScaleRule, companding: Companding = LINEAR) -> int:
    """Float32 bits of the multiplier that follows from an amax, given as its bits."""
    if rule is ScaleRule.NONE:
        return bits_of(1.0)
    if rule in (ScaleRule.E8M0_UP, ScaleRule.E8M0_FLOOR):
        byte = e8m0_byte_up(amax, fmt) if rule is ScaleRule.E8M0_UP else e8m0_byte_floor(amax, fmt)
        return NAN if byte == 0xFF else bits_of(2.0 ** (127 - byte))
    if amax == 0 or amax >= INFINITY:
        return bits_of(1.0)
    ratio = divide(bits_of(limit_of(fmt, companding)), amax)
    if rule is ScaleRule.TENSOR_POW2:
        return bits_of(2.0 ** min(_floor_log2(Fraction(float_of(ratio))) if ratio < INFINITY else 127, 126))
    scale = min(ratio, FLT_MAX)
    return scale & INFINITY if rule is ScaleRule.CURRENT_POW2 else scale


def dequant_scale(scale: int) -> int:
    """Float32 bits of fl(1 / quant_scale)."""
    return divide(bits_of(1.0), scale)


@functools.lru_cache(1 << 16)  # tests ask for each amax several times
def e8m0_byte_up(amax: int, fmt: Format) -> int:
    """The OCP MX scale byte of an amax, rounded up to a power of two."""
    if amax >= INFINITY:
        return 0xFE if amax == INFINITY else 0xFF
    inverse = Fraction(float_of(divide(bits_of(1.0), bits_of(fmt.max))))
    ratio = Fraction(float_of(_float32(Fraction(float_of(amax)) * inverse)))
    return next(byte for byte in range(0xFF) if ratio <= _power(byte - 127) or byte == 0xFE)


def e8m0_byte_floor(amax: int, fmt: Format) -> int:
    """The OCP MX scale byte of an amax by the standard's rule: its power of two, less that of the format's maximum."""
    if amax >= INFINITY:
        return 0xFE if amax == INFINITY else 0xFF
    if amax == 0:
        return 0
    byte = _floor_log2(Fraction(float_of(amax))) - _floor_log2(Fraction(fmt.max)) + 127
    return min(max(byte, 0), 0xFE)


def divide(a: int, b: int) -> int:
    """Bits of the float32 quotient of two float32 that are not negative, rounded once to nearest even (IEEE 754)."""
    if max(a, b) > INFINITY or a == b == INFINITY or a == b == 0:
        return NAN
    if a == INFINITY or b == 0:
        return INFINITY
    return 0 if b == INFINITY else _float32(Fraction(float_of(a)) / Fraction(float_of(b)))


def multiply(a: int, b: int) -> int:
    """Bits of the float32 product of two float32, rounded once to nearest even (IEEE 754)."""
    sign, (low, high) = (a ^ b) & SIGN, sorted((a % SIGN, b % SIGN))
    if high > INFINITY or (high == INFINITY and low == 0):
        return NAN
    return sign | (INFINITY if high == INFINITY else _float32(Fraction(float_of(low)) * Fraction(float_of(high))))


def square_root(a: int) -> int:
    """Bits of the float32 square root of a float32 that is not negative, rounded once to nearest even (IEEE 754)."""
    if a >= INFINITY or a == 0:
        return a
    value = Fraction(float_of(a))
    # the root of an integer of 80 bits or more has 16 bits to spare, and no root lies half way between two float32
    shift = (80 - _floor_log2(value)) // 2 * 2
    integer = value * _power(shift)
    root = math.isqrt(int(integer))
    return _float32(Fraction(2 * root + (root * root != integer), 2) * _power(-shift // 2))


def add(a: int, b: int) -> int:
    """Bits of the float32 sum of two finite float32, rounded once to nearest even; x - x is +0."""
    total = Fraction(float_of(a)) + Fraction(float_of(b))
    if total == 0:
        return a & b & SIGN
    return (SIGN if total < 0 else 0) | _float32(abs(total))


def _float32(value: Fraction) -> int:
    code, rounded = _nearest(value, FP32)
    return INFINITY if rounded > FP32.max else code


def _nearest(value: Fraction, fmt: Format) -> tuple[int, Fraction]:
    """Code, without sign, and value of the nearest number of the format's grid, were its exponent unbounded."""
    exponent = _exponent(value, fmt)
    spacing = _power(exponent - fmt.mantissa_bits)
    steps = round(value / spacing)  # Python rounds ties to even
    return ((exponent - (1 - fmt.bias)) << fmt.mantissa_bits) + steps, steps * spacing


def _exponent(value: Fraction, fmt: Format) -> int:
    """The exponent of the format's grid at a value that is not negative: its own, or that of the subnormals."""
    lowest = 1 - fmt.bias
    return max(_floor_log2(value), lowest) if value else lowest


def _encode_e8m0(value: Fraction) -> int:
    lowest = _power(-E8M0FNU.bias)
    if value <= lowest:
        return 0
    exponent = _floor_log2(value)
    # half way goes up; so does all that lies between the two lowest powers, in torch and ml_dtypes alike
    up = value >= Fraction(3, 2) * _power(exponent) or value < 2 * lowest
    return exponent + E8M0FNU.bias + int(up)


def _overflow(fmt: Format, saturating: bool) -> int:
    """The code, without sign, of what lies beyond the maximum."""
    if saturating:
        return encode(bits_of(fmt.max), fmt)
    if not fmt.has_inf:
        raise ValueError(f"{fmt.name} has no infinity")
    infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    return infinity << 13 if fmt is TF32 else infinity


def _with_sign(code: int, negative: bool, fmt: Format) -> int:
    if not negative or not fmt.signed:
        return code
    if fmt.is_integer:
        return -code % _modulus(fmt)
    return code | (SIGN if fmt is TF32 else 1 << (fmt.bits - 1))


def _modulus(fmt: Format) -> int:
    """One more than the largest code of an integer format as it is stored, a byte or two."""
    return 1 << max(fmt.bits, 8)


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= _power(exponent) else exponent - 1


@functools.cache
def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
