import os
import signal

from titan_train.train.process import SaveRequests


def test_signals_become_requests_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGUSR1)
    requests = SaveRequests()
    with requests.installed():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop
        assert requests.take_save()
        assert not requests.take_save()
    assert signal.getsignal(signal.SIGUSR1) is before
