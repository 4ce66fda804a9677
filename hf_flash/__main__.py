"""`python -m hf_flash doctor` and `python -m hf_flash bench`."""

import sys

USAGE = """usage: python -m hf_flash {doctor,bench} [--help]

  doctor   what this machine can do: GPU, kernels, versions, a one-second self-test
  bench    attention on this machine against PyTorch's own backends: a table and a plot"""


def main(arguments=None):
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command == "doctor":
        from .doctor import main as run
    elif command == "bench":
        from .bench import main as run
    else:
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    return run(rest)


if __name__ == "__main__":
    sys.exit(main())
