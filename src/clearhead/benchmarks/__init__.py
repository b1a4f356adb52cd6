"""How fast clearhead is on this machine, now, beside what else there is: `clearhead bench`.

    shapes    what is measured: layers of real models, by name
    peers     who else computes the same
    measure   ratios of alternating runs, the machine's own peaks, peak memory
    run       right first, then timed: one Row for each case, dtype and number of threads
    report    a table, Markdown, JSON, and the comparison with an earlier JSON
    chart     a PNG

A time says little about another machine, or about this one in an hour. So every figure is a ratio:
the peer runs right after ours, again and again, and the median of the ratios counts, with its
quartiles beside it. What else runs on the machine then disturbs both alike.
"""
