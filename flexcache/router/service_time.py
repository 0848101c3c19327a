"""Learns how long a worker takes for a prompt: from becoming the head of its queue to its first
token.

    service = factor of the worker * (a + b*u + att*u*(ctx + u/2) + load*loaded, for each tier)

``u`` is the number of tokens that the worker computes, behind a context of ``ctx`` tokens; ``a`` is
the cost of a request whatever its length, ``att`` that of attention, which grows with the square.

The coefficients are common to all workers and fitted by recursive least squares with a slow
forgetting; the factor of each worker is the ratio of its recent times to the common ones. Both
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
_LARGEST = 1e4
"""The largest multiple of the prior that is believed."""
_NOISE = 0.25
"""Spread of a measurement around its prediction, relative to it."""
_NOISE_S = 0.02
"""The same in seconds: a step of the engine."""
_KEEP = 0.998
"""Weight of the past, per sample: half after 350."""
_FACTOR_KEEP = 0.95
_FACTOR_PRIOR_S = 1.0
"""Measured seconds after which a worker's own ratio weighs as much as the assumption that it is
like the others."""
_FACTORS = 0.1, 10.0
MIN_SAMPLES = 20


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
        self._covariance = np.diag((self._prior * _PRIOR_SPREAD) ** 2)
        self._factor: FloatArray = np.ones(0)
        self._measured_s: list[float] = []
        self._predicted_s: list[float] = []
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
            self._measured_s += [0.0] * more
            self._predicted_s += [0.0] * more

    def forget_worker(self, worker: int) -> None:
        """Assume of a worker's number that it is like the others: it stands for another one."""
        self._factor[worker] = 1.0
        self._measured_s[worker] = self._predicted_s[worker] = 0.0

    def predict(self, num_tokens: int, matched: FloatArray) -> FloatArray:
        """Return the service time of a prompt on each worker.

        Args:
            matched: Tokens that each tier supplies, fastest first; shape (3, workers).
        """
        a, b, att, dram, disk = self._used
        new = num_tokens - matched.sum(axis=0)
        # u*(b + att*(ctx + u/2)) with ctx = num_tokens - u
        own: FloatArray = new * (-0.5 * att)
        own += b + att * num_tokens
        own *= new
        own += a
        own += matched[1] * dram
        own += matched[2] * disk
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
        features = _features(served.work)
        factor = float(self._factor[served.worker])
        predicted = float(np.dot(self._used, features))
        self._update(features, served.seconds / factor, predicted)
        self._learn_factor(served.worker, served.seconds, predicted)
        self.num_samples += 1

    def _update(self, features: FloatArray, seconds: float, predicted: float) -> None:
        """Take one step of recursive least squares with weights and forgetting."""
        gain = self._covariance @ features
        variance = (_NOISE * max(predicted, seconds)) ** 2 + _NOISE_S**2
        gain_scale = variance * _KEEP + float(features @ gain)
        self._theta += gain * ((seconds - float(self._theta @ features)) / gain_scale)
        self._covariance -= np.outer(gain, gain / gain_scale)
        self._covariance /= _KEEP
        # Never surer or vaguer than makes sense, however one-sided the samples are.
        vague = (self._prior * _PRIOR_SPREAD) ** 2
        excess = np.sqrt(np.maximum(np.diag(self._covariance) / vague, 1.0))
        self._covariance /= np.outer(excess, excess)
        self._used = np.clip(self._theta, self._prior / _LARGEST, self._prior * _LARGEST).tolist()

    def _learn_factor(self, worker: int, seconds: float, predicted: float) -> None:
        measured = self._measured_s[worker] = _FACTOR_KEEP * self._measured_s[worker] + seconds
        expected = self._predicted_s[worker] = _FACTOR_KEEP * self._predicted_s[worker] + predicted
        ratio = (measured + _FACTOR_PRIOR_S) / (expected + _FACTOR_PRIOR_S)
        self._factor[worker] = min(max(ratio, _FACTORS[0]), _FACTORS[1])

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
