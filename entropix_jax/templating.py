"""HTML templates, with escaping of everything that is inserted."""

import jinja2

_PACKAGES = ("entropix_jax.report", "entropix_jax.notebook")


def html_template(name: str) -> jinja2.Template:
    """The template `templates/{name}` of the report or the notebook package.

    Rendering raises `jinja2.UndefinedError` for a variable that is not given.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in _PACKAGES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
