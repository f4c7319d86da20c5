"""Least squares of a + b n + c n^2, and how sure its last term is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

TELLING = 0.1
"""The widest interval of a share, to either side, in which no term is still worth saying."""
_NUM_TERMS = 3


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """A fitted curve a + b n + c n^2.

    Attributes:
        a, b, c: its coefficients.
        c_within: half the width of the 95 % interval of c, from how the points scatter around the curve.
        longest: the largest n that was measured.
    """

    a: float
    b: float
    c: float
    c_within: float
    longest: float

    def at(self, n: float) -> float:
        """Its value."""
        return self.a + self.b * n + self.c * n * n

    @property
    def growth(self) -> float:
        """By what part of itself the value at 0 has grown at the largest n."""
        return self.at(self.longest) / self.a - 1

    @property
    def share(self) -> float:
        """What the quadratic term has of the value at the largest n."""
        return self.c * self.longest**2 / self.at(self.longest)

    @property
    def share_within(self) -> float:
        """Half the width of the 95 % interval of `share`."""
        return self.c_within * self.longest**2 / abs(self.at(self.longest))

    @property
    def verdict(self) -> str:
        """In words: whether a term was seen, and of what size it could be."""
        size = f"{self.share:+.1%} ± {self.share_within:.1%} of the value at {self.longest:.0f}"
        if abs(self.share) > self.share_within:
            return f"a quadratic term: {size}"
        return f"no quadratic term ({size})" if self.share_within <= TELLING else f"too noisy to say ({size})"


def fit(points: Sequence[tuple[float, float]]) -> Quadratic:
    """Fit a curve to (n, value), all points weighing the same.

    Args:
        points: at least four, at three or more different n.
    """
    longest = max(n for n, _ in points)
    scaled_P = torch.tensor([n / longest for n, _ in points], dtype=torch.float64)
    values_P = torch.tensor([value for _, value in points], dtype=torch.float64)
    terms_P3 = torch.stack([scaled_P**power for power in range(_NUM_TERMS)], dim=1)
    inverse_33 = torch.linalg.inv(terms_P3.T @ terms_P3)
    a, b, c = (inverse_33 @ terms_P3.T @ values_P).tolist()
    residuals_P = values_P - terms_P3 @ torch.tensor([a, b, c], dtype=torch.float64)
    degrees = len(points) - _NUM_TERMS
    variance = float(residuals_P.square().sum()) / degrees
    c_within = _student(degrees) * math.sqrt(variance * float(inverse_33[2, 2]))
    return Quadratic(a=a, b=b / longest, c=c / longest**2, c_within=c_within / longest**2, longest=longest)


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; within 1 % from five degrees of freedom on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
