"""The largest memory of a process, measured by itself."""

# Source of a function for programs that tests start. getrusage would count what the parent held, too: a new process has its
# memory until it executes its own program.
PEAK_BYTES = r"""
def peak_bytes():
    import re, resource
    try:
        status = open("/proc/self/status").read()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024
"""
