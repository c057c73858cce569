"""Where noise comes from: a seed that can be used again, or the operating system's entropy."""

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseSource:
    """Draws the noise, and which images a step looks at.

    Attributes:
        generator: On the CPU.
        careful: Each value is the sum of four draws, halved. The lowest bits of a single floating-point draw can tell
            what it was added to (Mironov, CCS 2012; Holohan and Braghin, ESORICS 2021).
    """

    generator: torch.Generator
    careful: bool

    def like(self, tensor: Tensor, deviation: float) -> Tensor:
        """Gaussian noise in the shape of a tensor, on its device."""
        shape, generator = tensor.shape, self.generator
        draws = [torch.randn(shape, generator=generator) for _ in range(4 if self.careful else 1)]
        noise: Tensor = deviation * torch.stack(draws).sum(dim=0) / len(draws) ** 0.5
        return noise.to(tensor.device)

    def drawn(self, n: int, rate: float) -> Tensor:
        """Which of ``n`` images a step looks at: each by itself with this probability; their rows."""
        return (torch.rand(n, generator=self.generator) < rate).nonzero().flatten()


def seeded(seed: int) -> NoiseSource:
    """Noise that the same seed gives again: for simulations, where nothing leaves anybody."""
    return NoiseSource(torch.Generator().manual_seed(seed), careful=False)


def from_the_system() -> NoiseSource:
    """Noise that nobody can draw again: a hospital's, for the coordinator knows the run's seeds."""
    return NoiseSource(torch.Generator().manual_seed(secrets.randbits(63)), careful=True)
