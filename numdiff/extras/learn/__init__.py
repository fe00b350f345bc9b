"""`numdiff learn`: the command of the chapters and puzzles in numdiff/lessons/."""
