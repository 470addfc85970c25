"""Roles as groups of processes on Ray: where they are placed, how they are called, and what each of them does.

The only Ray code beside `main`. `placement` and `launch` start processes, `dispatch` and `worker_group` call them,
`table` is what they hand to each other, `roles` is what they compute. It knows no order of phases: that is the
controller's.
"""
