"""`python -m fednorm` is `fednorm`."""

from fednorm.cli import main

if __name__ == "__main__":
    main()
