"""Service time of a worker, learned: from becoming the head of its queue to the first token.

    service = factor of the worker * (a + b*u + att*u*(ctx + u/2) + load*loaded, for each tier)

``u`` is the number of tokens that the worker computes, behind a context of ``ctx`` tokens; ``a`` is
the cost of a request whatever its length, ``att`` that of attention, which grows with the square.

The coefficients are common to all workers and fitted by recursive least squares with a slow
forgetting; the factor of each worker compares its recent times with those of the others. Both
start from a pessimistic prior: an overestimated cost is learned away within a few requests, while
an underestimated one sends too much to one worker meanwhile.

Pure: no clock.
"""

from __future__ import annotations

import math

import numpy as np

from flexcache.errors import InternalError
from flexcache.router.load import FloatArray, Served, Work

_PRIOR = np.array([0.05, 2e-4, 5e-9, 2e-5, 8e-5])
"""Seconds per request, token, token and token of context, token loaded from DRAM, from disk. A
70B model on a fast GPU takes about half of it."""
_PRIOR_SPREAD = 30.0
"""How far from the prior a coefficient may well be, as a multiple of it."""
_IDENTITY = np.eye(len(_PRIOR))
_LARGEST = 1e4
"""The largest multiple of the prior that is believed."""
_NOISE = 0.25
"""Spread of a row around its prediction, relative to it."""
_NOISE_S = 0.02
"""The same in seconds: a step of the engine."""
_ROW = 4
"""Requests that are summed up."""
_KEEP = 0.995
"""Weight of the past per row: half after 140 rows."""
_OUTLIER = 5.0
"""A row counts for no more than this multiple of the expected spread."""
_FACTOR_KEEP = 0.9
_ASSUMED = 0.25
"""Rows that the assumption weighs that a worker is like the others."""
_FACTORS = 0.1, 10.0
MIN_SAMPLES = 20


class _Row:
    """Measurements of successive requests on one worker, summed up.

    An engine computes several prompts in one step, so that how the step's time is shared among them
    is arbitrary, while its sum is not. At first a row has a single request, later several.
    """

    __slots__ = ("_features", "_missing", "_seconds", "_size")

    def __init__(self) -> None:
        self._size = self._missing = 1
        self._features = np.zeros(len(_PRIOR))
        self._seconds = 0.0

    def add(self, features: FloatArray, seconds: float) -> None:
        self._features += features
        self._seconds += seconds
        self._missing -= 1

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def take(self) -> tuple[FloatArray, float]:
        """Return the sums and begin another row."""
        row = self._features, self._seconds
        self._size = self._missing = min(2 * self._size, _ROW)
        self._features = np.zeros(len(_PRIOR))
        self._seconds = 0.0
        return row


class _Ratio:
    """Ratio of a worker's recent measured times to those predicted for all."""

    __slots__ = ("_count", "_measured_s", "_predicted_s", "value")

    def __init__(self) -> None:
        self._count = self._measured_s = self._predicted_s = 0.0
        self.value = 1.0

    def add(self, measured_s: float, predicted_s: float) -> None:
        self._count = _FACTOR_KEEP * self._count + 1
        self._measured_s = _FACTOR_KEEP * self._measured_s + measured_s
        self._predicted_s = _FACTOR_KEEP * self._predicted_s + predicted_s
        assumed_s = _ASSUMED * self._predicted_s / self._count
        self.value = (self._measured_s + assumed_s) / (self._predicted_s + assumed_s)


class ServiceTime:
    """Predicts service times, and learns them from first tokens.

    Args:
        prior: Multiple of the built-in prior to start from.

    Attributes:
        num_samples: Measured requests.
    """

    def __init__(self, num_workers: int = 0, *, prior: float = 1.0) -> None:
        self._prior = _PRIOR * prior
        self._theta = self._prior.copy()
        self._used: list[float] = self._theta.tolist()
        self._covariance = _IDENTITY * _PRIOR_SPREAD**2
        self._factor: FloatArray = np.ones(0)
        self._ratios: list[_Ratio | None] = []
        """None of a worker that was not measured: it is like the others, however wrong the common
        prediction was of those."""
        self._measured = 0
        self._sum_of_ratios = 0.0
        self._rows: list[_Row] = []
        self.num_samples = 0
        self.resize(num_workers)

    @property
    def is_known(self) -> bool:
        """Whether there are enough samples to predict seconds."""
        return self.num_samples >= MIN_SAMPLES

    @property
    def coefficients(self) -> tuple[float, ...]:
        """a, b, att and the load times per token from DRAM and disk."""
        return tuple(self._used)

    @property
    def factors(self) -> FloatArray:
        """How many times slower than the common prediction each worker is."""
        return self._factor

    def resize(self, num_workers: int) -> None:
        """Make room for workers ``0 .. num_workers - 1``."""
        more = num_workers - len(self._factor)
        if more > 0:
            self._factor = np.append(self._factor, np.ones(more))
            self._rows += [_Row() for _ in range(more)]
            self._ratios += [None] * more

    def forget_worker(self, worker: int) -> None:
        """Assume of a worker's number that it is like the others: it stands for another one."""
        self._factor[worker] = 1.0
        if (ratio := self._ratios[worker]) is not None:
            self._sum_of_ratios -= ratio.value
            self._measured -= 1
        self._ratios[worker] = None
        self._rows[worker] = _Row()

    def predict(self, num_tokens: int, matched: FloatArray) -> FloatArray:
        """Return the service time of a prompt on each worker.

        Args:
            matched: Tokens that each tier supplies, fastest first; shape (3, workers).
        """
        a, b, att, dram, disk = self._used
        own: FloatArray
        cached, own = np.array([[1.0, 1.0, 1.0], [0.0, dram, disk]]) @ matched
        new: FloatArray = num_tokens - cached
        # u*(b + att*(ctx + u/2)) with ctx = num_tokens - u
        compute: FloatArray = new * (-0.5 * att)
        compute += b + att * num_tokens
        compute *= new
        own += compute
        own += a
        own *= self._factor
        return own

    def predict_one(
        self, worker: int, num_tokens: int, new_tokens: int, dram_tokens: int, disk_tokens: int
    ) -> float:
        """Return the service time of a prompt on a worker that computes ``new_tokens`` of it."""
        a, b, att, dram, disk = self._used
        own = a + new_tokens * (b + att * (num_tokens - new_tokens / 2))
        own += dram_tokens * dram + disk_tokens * disk
        return own * float(self._factor[worker])

    def learn(self, served: Served) -> None:
        """Learn from a measured service time."""
        self.num_samples += 1
        row = self._rows[served.worker]
        row.add(_features(served.work), served.seconds)
        if not row.is_complete:
            return
        features, seconds = row.take()
        predicted = float(np.dot(self._used, features))
        self._update(features, seconds / float(self._factor[served.worker]), predicted)
        ratio = self._ratios[served.worker]
        if ratio is None:
            ratio = self._ratios[served.worker] = _Ratio()
            self._measured += 1
            self._sum_of_ratios += ratio.value
        before = ratio.value
        ratio.add(seconds, predicted)
        self._sum_of_ratios += ratio.value - before
        factor = ratio.value * self._measured / self._sum_of_ratios
        self._factor[served.worker] = min(max(factor, _FACTORS[0]), _FACTORS[1])

    def _update(self, features: FloatArray, seconds: float, predicted: float) -> None:
        """Take one step of recursive least squares with weights and forgetting.

        In units of the prior, and in Joseph's form (a sum of squares), so that rounding does not
        add up to a covariance that is none, however many and alike the samples are.
        """
        scaled = features * self._prior
        # Forget only in the direction of this row (Cao and Schwartz): the rest stays known.
        told = float(scaled @ np.linalg.solve(self._covariance, scaled))
        self._covariance += np.outer(scaled, scaled) * ((1 - _KEEP) / _KEEP / told)
        gain = self._covariance @ scaled
        noise = (_NOISE * predicted) ** 2 + _NOISE_S**2
        spread = noise + float(scaled @ gain)
        gain /= spread
        error = seconds - float(self._theta @ features)
        largest = _OUTLIER * math.sqrt(spread)
        self._theta += self._prior * gain * min(max(error, -largest), largest)
        kept = _IDENTITY - np.outer(gain, scaled)
        self._covariance = kept @ self._covariance @ kept.T + np.outer(gain, gain) * noise
        self._used = np.clip(self._theta, self._prior / _LARGEST, self._prior * _LARGEST).tolist()

    def check(self) -> None:
        """Verify that all predictions are finite and positive.

        Raises:
            InternalError: They are not.
        """
        if not all(0 < each < math.inf for each in self._used):
            raise InternalError(f"coefficients {self._used}")
        if not np.all((self._factor >= _FACTORS[0]) & (self._factor <= _FACTORS[1])):
            raise InternalError(f"factors {self._factor}")
        if np.any(np.diag(self._covariance) < 0) or not np.all(np.isfinite(self._covariance)):
            raise InternalError("the covariance is not one")


def _features(work: Work) -> FloatArray:
    """Return what the coefficients are multiplied with."""
    new = work.new_tokens
    context = work.num_tokens - new
    return np.array([1.0, new, new * (context + new / 2), work.dram_tokens, work.disk_tokens])
