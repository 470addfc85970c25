"""The programs of the wheel, `ppojob` and `kubectl-ppo`. It imports what they need when they are called."""

from ppojob_api.missing_packages import name_the_extra


def ppojob() -> None:
    """Run `ppojob`."""
    with name_the_extra(
        "trainer (NVIDIA GPUs) or trainer-cpu; validate, convert and plot need the extra kubectl alone"
    ):
        from ppojob_trainer.cli import main

        main()


def kubectl_ppo() -> None:
    """Run `kubectl-ppo`."""
    with name_the_extra("kubectl"):
        from ppojob_trainer.kubectl.app import main

        main()
