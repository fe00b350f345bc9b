"""The puzzles: what a learner gets, and below the line "For the judge" the problems, the limits and
the hints."""
