"""The normal quantile in float64, bit-exact on every IEEE machine.

Wichura's AS 241 (PPND16, Applied Statistics 37, 1988; relative error about 1e-16). Each numpy call is one
correctly rounded operation per element, which compilers cannot fuse or reorder; even the logarithm is
computed here, because libraries differ in its last bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Highest power first, for Horner's rule.
_CENTRE_NUM = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_CENTRE_DEN = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_TAIL_NUM = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_TAIL_DEN = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_FAR_NUM = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_FAR_DEN = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH_TERMS = tuple(1.0 / power for power in range(21, 0, -2))


def normal_quantile_from_centre(centred: Array) -> Array:
    """The normal quantile of 1/2 + ``centred``, for -1/2 < centred < 1/2."""
    squared = centred * centred
    np.subtract(0.180625, squared, out=squared)
    quantile = _horner(_CENTRE_NUM, squared)
    quantile /= _horner(_CENTRE_DEN, squared)
    quantile *= centred
    tail = np.flatnonzero(np.abs(centred) > 0.425)
    quantile[tail] = _tail_quantile(centred[tail])
    return quantile


def _tail_quantile(centred: Array) -> Array:
    r = np.sqrt(_minus_log(0.5 - np.abs(centred)))
    quantile = _horner(_TAIL_NUM, r - 1.6) / _horner(_TAIL_DEN, r - 1.6)
    far = np.flatnonzero(r > 5.0)
    quantile[far] = _horner(_FAR_NUM, r[far] - 5.0) / _horner(_FAR_DEN, r[far] - 5.0)
    return np.copysign(quantile, centred)


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


def _minus_log(p: Array) -> Array:
    """-ln p: p = m 2**e with sqrt(1/2) <= m < sqrt(2), ln m = 2 atanh((m - 1)/(m + 1)) by its series."""
    mantissa, exponent = np.frexp(p)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    whole = np.where(small, exponent - 1, exponent).astype(np.float64)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    log_mantissa = 2.0 * f * _horner(_ATANH_TERMS, f * f)
    result: Array = -(whole * _LN2 + log_mantissa)
    return result
