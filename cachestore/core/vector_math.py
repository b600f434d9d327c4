"""torch's vector math on the CPU (exp, sin, tanh, ...): asked once by one thread, before several ask it at once. Imports torch.

Where torch is built with oneMKL before 2025.0 (2.13 is, with 2024.2), the first such call of a process finds out what the processor can
do. It keeps the answer in one variable, which for a moment holds a number that means something else. A thread that reads it then takes
the kernels of the lowest accuracy for its share of that call: in exp up to 1.5e-4 of the value where 6e-8 is due (pytorch issue 188792,
seen on Intel processors).
"""

import torch


def settle() -> None:
    """Make that first call with one number, in float32 on the CPU whatever torch's defaults are: others have kernels of their own."""
    torch.zeros(1, dtype=torch.float32, device="cpu").exp()
