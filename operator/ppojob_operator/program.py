"""The program of the wheel, `ppojob-operator`. It imports what it needs when it is called."""

from ppojob_api.missing_packages import name_the_extra


def ppojob_operator() -> None:
    """Run the operator."""
    with name_the_extra("operator"):
        from ppojob_operator.main import main

        main()
