// Announces the text to screen readers as it arrives: whole sentences, with a pause between them.

const PAUSE = 1500; // ms
const SENTENCE = /^[\s\S]*[.!?…:;\n](?=\s|$)/;

export class Speaker {
  constructor(region) {
    this.region = region;
    this.rest = "";
    this.timer = null;
  }

  add(text) {
    this.rest += text;
    this.timer ??= setTimeout(() => this.speak(), PAUSE);
  }

  speak() {
    this.timer = null;
    const sentence = SENTENCE.exec(this.rest)?.[0];
    if (!sentence) return;
    this.rest = this.rest.slice(sentence.length);
    this.say(sentence.trim());
  }

  // Discards the rest, for another text.
  clear() {
    clearTimeout(this.timer);
    this.timer = null;
    this.rest = "";
  }

  // Announces the rest, and how the text ended.
  end(words) {
    this.say(`${this.rest.trim()} ${words}`.trim());
    this.clear();
  }

  say(words) {
    this.region.textContent = words;
  }
}
