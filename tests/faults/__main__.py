import sys

from tests.faults.suite import main

if __name__ == "__main__":
    sys.exit(main())
