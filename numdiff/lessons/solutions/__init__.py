"""A solution of each puzzle, with three stars."""
