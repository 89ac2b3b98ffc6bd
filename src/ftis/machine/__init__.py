"""The machine: its cores and memory, and a process that may take only so much of them."""
