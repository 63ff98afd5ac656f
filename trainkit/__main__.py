"`python -m trainkit` is the same as `trainkit`."
from .cli import main

main()
