"""A pytest plugin: tests whose kernels run in the emulator, without a GPU.

    pytest --emulate                                    every test; kernels are emulated from the first import on

    @pytest.mark.emulate(cc=(8, 0), orders=3)           this test, once in each of three thread orders
    def test_sum(): ...

    def test_sum(cuda_emulator):                        this test; the fixture is the `Emulator`
        cuda_emulator.launch(kernel, 1, 32, x)

A fault fails the test that launched the kernel. The traceback ends in the line of the launch, and a
section of the report has each fault's source line with a sentence of advice. The options are those
of options.py: `--emulate-cc 8.0` on the command line, `cc=(8, 0)` in the mark, which overrides it.

pytest imports this file at each start, so it imports nothing of the emulator until a test is
emulated.
"""

import sys

import pytest

from . import options

PREFIX = "--emulate-"
PACKAGE = __package__
STARTED = pytest.StashKey()  # of the config: the emulator that `--emulate` has installed
MACHINE = pytest.StashKey()  # of a test: its emulator
COSTS = pytest.StashKey()  # of the config: [Cost] of all tests
ORDER = "cuda_thread_order"  # of the parameter that a test has for its thread order


def pytest_addoption(parser):
    group = parser.getgroup("CUDA emulator")
    group.addoption(
        "--emulate", action="store_true", help="run the CUDA kernels of all tests in the emulator"
    )
    options.add_options(
        lambda name, **how: group.addoption(name, dest=name[2:].replace("-", "_"), **how), PREFIX
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    # before modules are imported whose kernels have signatures
    if early_config.known_args_namespace.emulate:
        start(early_config, early_config.known_args_namespace)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "emulate(cc, orders, order, seed, without, strict, float64, patience, counts): "
        "run the test's CUDA kernels in the emulator",
    )
    if config.option.emulate and STARTED not in config.stash:
        start(config, config.option)


def start(config, given):
    from .counts import Recorder
    from .host import install

    chosen = on_command_line(given)
    recorder = Recorder() if chosen.get("counts") else None
    config.stash[STARTED] = install(
        recorder=recorder, **options.as_arguments(chosen, options.orders_of(chosen)[0])
    )


def pytest_unconfigure(config):
    if STARTED in config.stash:
        from .host import uninstall

        del config.stash[STARTED]
        uninstall()


def on_command_line(given):
    named = {name: getattr(given, f"emulate_{name}", None) for name in options.OPTIONS}
    return {name: value for name, value in named.items() if value is not None}


def chosen_for(item, config):
    """The options of a test, or None if it is not emulated."""
    mark = item.get_closest_marker("emulate")
    if (
        mark is None
        and not config.option.emulate
        and "cuda_emulator" not in getattr(item, "fixturenames", ())
    ):
        return None
    chosen = on_command_line(config.option)
    if mark is not None:
        if mark.args:
            raise ValueError("it takes named arguments only.")
        chosen |= options.read(mark.kwargs)
    return chosen


def pytest_collection_modifyitems(config, items):
    for item in items:
        try:
            chosen_for(item, config)
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.emulate: {error}") from None


def pytest_generate_tests(metafunc):
    config, definition = metafunc.config, metafunc.definition
    if (
        definition.get_closest_marker("emulate") is None
        and not config.option.emulate
        and ("cuda_emulator" not in metafunc.fixturenames)
    ):
        return
    definition.fixturenames = metafunc.fixturenames
    try:
        orders = options.orders_of(chosen_for(definition, config))
    except ValueError:  # which pytest_collection_modifyitems reports
        return
    if len(orders) > 1:
        if ORDER not in metafunc.fixturenames:
            metafunc.fixturenames.append(ORDER)
        metafunc.parametrize(ORDER, orders, indirect=True)


@pytest.fixture
def cuda_thread_order(request):
    """The order in which the threads of this test's kernels take turns."""
    return getattr(request, "param", None)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    chosen = chosen_for(item, item.config)
    if chosen is None:
        yield
        return
    order = getattr(getattr(item, "callspec", None), "params", {}).get(ORDER)
    installed = item.config.stash.get(STARTED, None)
    if installed is not None and order is None and item.get_closest_marker("emulate") is None:
        item.stash[MACHINE] = installed
        yield
        return
    with emulated(item, chosen, order or options.orders_of(chosen)[0]):
        yield


class emulated:
    """The context in which a test has an emulator of its options."""

    def __init__(self, item, chosen, order):
        from .counts import Recorder
        from .host import device

        self.item, self.recorder = item, Recorder() if chosen.get("counts") else None
        self.context = device(recorder=self.recorder, **options.as_arguments(chosen, order))

    def __enter__(self):
        self.item.stash[MACHINE] = self.context.__enter__()
        return self.item.stash[MACHINE]

    def __exit__(self, *error):
        self.context.__exit__(None, None, None)
        if self.recorder is not None:
            keep_costs(self.item.config, self.recorder)


def keep_costs(config, recorder):
    from .findings import costs_of

    config.stash.setdefault(COSTS, []).extend(costs_of(recorder))
    recorder.launches.clear()


@pytest.fixture
def cuda_emulator(request):
    """The emulator that runs the kernels of this test: `numdiff.emulator.Emulator`."""
    item = request.node
    if MACHINE in item.stash:
        yield item.stash[MACHINE]
    else:  # a fixture's name that only getfixturevalue has
        chosen = on_command_line(request.config.option)
        with emulated(item, chosen, options.orders_of(chosen)[0]) as machine:
            yield machine


# Reports ------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    faults = sys.modules.get(f"{PACKAGE}.faults")
    ours = (
        faults is not None
        and call.excinfo is not None
        and isinstance(call.excinfo.value, faults.EmulatorError)
    )
    if ours:  # only the program's own frames are of interest

        def is_ours(excinfo):
            return excinfo is None or isinstance(excinfo.value, faults.EmulatorError)

        for name, module in list(sys.modules.items()):
            if name.startswith(f"{PACKAGE}."):
                module.__dict__["__tracebackhide__"] = is_ours
    outcome = yield
    if ours and isinstance(call.excinfo.value, faults.KernelFault):
        from .findings import merge

        found = merge({"": call.excinfo.value.faults})
        outcome.get_result().sections.append(("CUDA emulator", "\n\n".join(map(str, found))))


def pytest_sessionfinish(session):
    config = session.config
    machine = config.stash.get(STARTED, None)
    if machine is not None and machine.recorder is not None:
        keep_costs(config, machine.recorder)
    if hasattr(config, "workeroutput"):
        config.workeroutput["cuda_emulator"] = [
            list(vars(cost).values()) for cost in config.stash.get(COSTS, ())
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    found = getattr(node, "workeroutput", {}).get("cuda_emulator")
    if found:
        from .findings import Cost

        node.config.stash.setdefault(COSTS, []).extend(Cost(*each) for each in found)


def pytest_terminal_summary(terminalreporter, config):
    costs = config.stash.get(COSTS, ())
    if costs:
        from .findings import merge_costs

        terminalreporter.section("CUDA emulator: what takes more memory requests than it must")
        for cost in merge_costs(costs):
            terminalreporter.write_line(str(cost))
