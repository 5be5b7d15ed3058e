"""Public functions up to their launches, without a GPU: arrays, allocations and launches are stand-ins.

`fakes` has the stand-ins. test_refusals.py, test_launches.py and test_memo.py run over the table of
operations in tests/operations, with the help of `suite`. The other files hold what is special about one
family.
"""
