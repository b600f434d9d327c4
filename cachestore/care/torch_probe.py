"""The process that `doctor` asks which devices torch sees: it prints one line. None of torch's threads or memory stays with `doctor`."""

import sys


def main(_arguments: list[str]) -> None:
    """Print torch's version and its devices."""
    import torch

    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    sys.stdout.write(f"torch {torch.__version__} with CUDA {torch.version.cuda} sees {', '.join(names) or 'no GPU'}\n")
