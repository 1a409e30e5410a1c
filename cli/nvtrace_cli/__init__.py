"""nvtrace_cli: the command line `nvtrace`. Knows terminals; what it shows comes from `nvtrace`."""
