"""Who owns which atom, who needs copies of it, and how rows move between ranks.

One way: geometry → plan → halo → epoch. Only ``transport`` moves rows, only ``reduce`` sums scalars.
"""
