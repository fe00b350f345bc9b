"""Six chapters, text with code: `numdiff learn --chapter 1`. ../chapter.py reads them, ../lab.py is
what they import.

A chapter is a file in jupytext's percent format. A line `# %%` begins a cell of code, `# %%
[markdown]` one of text. A heading `## …` begins a unit: one idea, at most 60 lines. The last unit
links the file of the project that the reader now understands. A line "Puzzles: 1, 2" in the text
names the puzzles that can be solved from there on.
"""
