"""Six chapters and thirty puzzles, from one thread for an element to a pipeline on tensor cores:
`numdiff learn`.

chapters/ has the texts. chapter.py runs them and makes notebooks of them; lab.py is what their
cells import.

puzzles/ holds a file for each puzzle, solutions/ a solution of each. catalogue.py finds and copies
them, judge.py runs a learner's kernel in the emulator, advice.py explains what is wrong with it,
progress.py keeps the stars, on_device.py runs a right answer on a GPU.

A puzzle's file has two parts. The learner gets all above the line "For the judge": the text, the
specification in NumPy, the kernel with `# fill in`. Below it are names for the judge:

    HINTS           sentences, of which each try shows one more
    problems(rng)   yields (grid, block, inputs); the kernel is called with the inputs and `out`, which is uninitialised
    launch(run, learner, grid, block, inputs, out)      optional: the launches, where there are several, or tensor maps
    LIMITS          {figure of emulator.counts: (most for three stars, what to do)}, of the first problem
    USES            {name that the kernel must use for three stars: why}
    CONFLICTS, UNCOALESCED, COALESCE, TOLERANCE         optional: other limits than judge.py's, another advice
"""
