"""What differs between operating systems: files, memory, processes and processors. No other module names a system."""
