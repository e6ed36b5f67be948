import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Collectors;

/** Posts a body with the client as it is by default, which asks for an upgrade to HTTP/2, and prints the answer. */
public class Ask {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var request = HttpRequest.newBuilder(URI.create(arguments[0]))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(arguments[1]))
            .build();
        var response = client.send(request, HttpResponse.BodyHandlers.ofLines());
        System.out.println(response.statusCode());
        System.out.println(response.body().collect(Collectors.joining("\n")));
    }
}
