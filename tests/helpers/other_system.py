"""Takes away from this process what only Linux or only POSIX has, before the program under test is imported.

    import other_system; other_system.take_away()

What the interpreter or its libraries have loaded before keeps working; the program finds the calls missing, as on Windows.
"""

import builtins
import ctypes
import os
import platform
import signal
import sys

MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog")
CALLS = (
    *(
        "pread",
        "preadv",
        "pwrite",
        "pwritev",
        "posix_fallocate",
        "posix_fadvise",
        "posix_madvise",
        "sendfile",
        "copy_file_range",
    ),
    *("sched_getaffinity", "sched_setaffinity", "sched_yield", "register_at_fork", "fork", "forkpty", "setsid", "killpg"),
    *(
        "getuid",
        "geteuid",
        "getgid",
        "chown",
        "fchown",
        "fchmod",
        "mkfifo",
        "nice",
        "getpriority",
        "setpriority",
    ),
    *("sync", "uname", "getloadavg", "O_DIRECT", "O_NOFOLLOW", "O_CLOEXEC", "O_SYNC"),
)
SIGNALS = ("SIGBUS", "SIGHUP", "SIGPIPE", "SIGALRM", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGTSTP", "SIGCONT")


def take_away():
    """From now on this process is without MODULES, CALLS, SIGNALS, the C library, /proc and /sys, and cannot open folders."""
    platform.libc_ver(), platform.platform()  # kept by the module
    import numba  # noqa: F401  numpy and numba ask for the processor when they are imported

    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    for name in MODULES:
        sys.modules[name] = None
    for name in SIGNALS:
        if hasattr(signal, name):
            delattr(signal, name)
    real_open, real_os_open, real_library = builtins.open, os.open, ctypes.CDLL

    def open_(file, *arguments, **keywords):
        if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return real_open(file, *arguments, **keywords)

    def os_open(path, *arguments, **keywords):
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_os_open(path, *arguments, **keywords)

    def library(name, *arguments, **keywords):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return real_library(name, *arguments, **keywords)

    builtins.open, os.open, ctypes.CDLL = open_, os_open, library
