"""What a user imports: names of the package and its subpackages, in an interpreter without the tests' own imports.

The tests take over 10 s: each import is tried in a process of its own.
"""

import subprocess
import sys

PROGRAM = """
import sys
import pfl_lightning

assert "pfl_lightning.methods" not in sys.modules  # lazy
assert {"FederatedLoop", "callbacks", "datamodules", "methods", "__version__"} <= set(dir(pfl_lightning))
assert pfl_lightning.methods.FedPAC.__name__ == "FedPAC"
assert issubclass(pfl_lightning.callbacks.ResultsWriter, pfl_lightning.ResultsWriter)
assert pfl_lightning.datamodules.Digits.__name__ == "Digits"
assert pfl_lightning.functional.weighted_average and pfl_lightning.self_supervised.SimCLR
try:
    pfl_lightning.nothing
except AttributeError as error:
    assert str(error) == "module 'pfl_lightning' has no attribute 'nothing'"
else:
    raise AssertionError

from pfl_lightning import *

assert FederatedLoop(cohort=2).cohort == 2 and pfl_lightning.callbacks.ResultsWriter is ResultsWriter

# Every module can be the first one that is imported: no cycle of imports.
names = "callbacks cli client datamodules drop_in encoders engines functional methods self_supervised state".split()
for name in names:
    for loaded in [module for module in sys.modules if module.partition(".")[0] == "pfl_lightning"]:
        del sys.modules[loaded]
    __import__(f"pfl_lightning.{name}")
"""


def test_imports(tmp_path):
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
