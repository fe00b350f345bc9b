"""Every kernel of the project on a small case: right, the same bits in every run, and without a
fault.

`CASES` of run.py has a small problem for each operation and version. `check_case` runs one on a device and
holds the results against the float64 reference, which is the same call with NumPy arrays. On the
emulator it runs in several thread orders, with every check on; on a GPU, twice. `compare_devices`
says whether two devices give the same bits.

run.py runs and judges, case.py says what a case is, records.py makes cases of the operations'
records, bfloat16.py repeats some in that type. show.py and version.py describe an operation and a
version of it.

    numdiff kernels check                          all of them, in the emulator
    numdiff kernels check softmax --device cuda
    numdiff kernels check softmax --counts         and what each of their lines costs
"""
