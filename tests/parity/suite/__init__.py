"""The parity suite: the same training run on one device and on meshes, compared number by number.

    cases       what is run: family, mesh, steps
    families    the models, built here
    training    what every rank does
    comparison  what is compared, and how closely
    faults      mistakes put in by hand, which the comparison must find
    pool        the ranks: processes that live as long as the tests
    worker      what such a process runs
"""
