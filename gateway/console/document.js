for (const block of document.querySelectorAll(".document pre")) block.replaceWith(codeBlock(block.textContent));
