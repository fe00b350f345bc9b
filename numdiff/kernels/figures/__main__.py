"""`python -m numdiff.kernels.figures RESULTS`: enter measured figures into the card's file."""
from . import main

main()
