"""A Flame cluster as a fleet: the same tasks, on executors that come and go.

The driver's side: `fleet` keeps the contract, `desk` sees every task to its one end, `cluster` and
`objects` know flamepy, `bundle` what is shipped, `lease` is the sign of life that runs leave,
`start` how an application comes to answer, `withdrawal` how it goes. The worker's side: `loader`
unpacks what was shipped, `service` keeps one child process and speaks for it. Must not know:
algorithms, files of a run, displays.
"""
