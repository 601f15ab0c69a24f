import os

import pytest

from kdgen.errors import KernelFault
from kdgen.verify import sanitize

NOTE = "from kdgen.verify.sanitize import note; note('tree_build', 'NaN', 'reversed'); "


def test_exit_codes_are_passed_on() -> None:
    assert sanitize.rerun(["3"], ("-c", "import sys; sys.exit(int(sys.argv[1]))")) == 3


def test_the_process_knows_what_it_is() -> None:
    assert not sanitize.is_sanitized()
    code = "import sys; from kdgen.verify.sanitize import is_sanitized; from kdgen.runtime.host_library import has_sanitizer; "
    assert sanitize.rerun([], ("-c", code + "sys.exit(10 * is_sanitized() + has_sanitizer())")) == 11
    assert sanitize.NOTE_VARIABLE not in os.environ


def test_what_ran_when_the_sanitizer_struck_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KernelFault, match=r"stopped the run: kernel tree_build, case NaN, reversed; its report is above"):
        sanitize.rerun([], ("-c", NOTE + "import ctypes; ctypes.memset(8, 0, 1)"))
    assert "AddressSanitizer" in capfd.readouterr().err


def test_a_process_killed_otherwise_is_told_too() -> None:
    with pytest.raises(KernelFault, match="before the first launch"):
        sanitize.rerun([], ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
