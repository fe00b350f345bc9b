"""Two "hosts" on one machine: network namespaces that a virtual cable joins, and MPICH's ranks on
both over TCP."""

import contextlib
import functools
import os
import shutil
import subprocess

LAUNCH = """#!/bin/sh
# called by mpiexec in place of ssh: options, host, command
while [ "${1#-}" != "$1" ]; do shift; done
host=NAME${1##*.}
shift
exec ip netns exec $host unshare -u sh -c "hostname $host; exec $*"
"""


def sh(*command):
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def can_make_hosts(mpiexec):
    """Whether this process may make network namespaces, and mpiexec is MPICH's."""
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        with namespaces(f"numdiff-probe-{os.getpid()}-"):
            sh("unshare", "-u", "true")
        return "HYDRA" in version and shutil.which("hydra_pmi_proxy", path=os.path.dirname(mpiexec))
    except (OSError, TypeError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def namespaces(prefix):
    """Context: two of them, the prefix with 1 and 2."""
    names = [f"{prefix}{i}" for i in (1, 2)]
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                sh("ip", "netns", "del", name)


@contextlib.contextmanager
def two_hosts(mpiexec, folder):
    """Context: a function of the number of ranks, of ranks a host, and a command; it gives the
    command to run."""
    prefix = f"numdiff-{os.getpid()}-"
    cables = [f"nd{os.getpid()}{end}" for end in "ab"]
    with namespaces(prefix) as names:
        sh("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for i, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            sh("ip", "link", "set", cable, "netns", name)
            within = functools.partial(sh, "ip", "netns", "exec", name, "ip")
            within("addr", "add", f"10.9.0.{i}/24", "dev", cable)
            within("link", "set", cable, "up")
            within("link", "set", "lo", "up")
        script = folder / "launch"
        script.write_text(LAUNCH.replace("NAME", prefix))
        script.chmod(0o755)

        def job(count, per_host, *command):
            mpi = [
                mpiexec,
                "-launcher",
                "ssh",
                "-launcher-exec",
                script,
                "-hosts",
                "10.9.0.1,10.9.0.2",
                "-n",
                count,
                "-ppn",
                per_host,
            ]
            return [
                "ip",
                "netns",
                "exec",
                names[0],
                "unshare",
                "-u",
                "sh",
                "-c",
                'hostname "$0"; exec "$@"',
                names[0],
                *map(str, mpi),
                *command,
            ]

        yield job
