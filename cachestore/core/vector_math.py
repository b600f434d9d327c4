"""A workaround for torch's vector math on the CPU (exp, sin, tanh, ...): one thread calls it before several do. Imports torch.

If torch is built with oneMKL before 2025.0 (torch 2.13 has 2024.2), the first such call of a process detects what the processor can do. It
keeps the answer in one variable, which for a moment holds a number that means something else. A thread that reads it then uses the kernels
of the lowest accuracy for its part of that call: exp has a relative error of up to 1.5e-4 instead of 6e-8 (pytorch issue 188792, seen on
Intel processors).
"""

import torch


def settle() -> None:
    """Make the first call, with one number in float32 on the CPU: torch's defaults may be another dtype or device, with other kernels."""
    torch.zeros(1, dtype=torch.float32, device="cpu").exp()
