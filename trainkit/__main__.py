"`python -m trainkit` is the same as `trainkit`."
import sys


def start() -> None:
    "Import the program and run it; Ctrl-C ends it without a traceback while it is imported, too."
    try:
        from .cli import main

        main()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    start()
