"""In a process that a command runs in, which imports this again, nothing is imported."""

if __name__ == "__main__":
    import sys

    from tests.faults.suite import main

    sys.exit(main())
