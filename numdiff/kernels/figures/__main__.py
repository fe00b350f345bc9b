"""`python -m numdiff.kernels.figures RESULTS`: enter measured figures into the card's file."""

from . import main

if __name__ == "__main__":  # tests and documentation import every module
    main()
